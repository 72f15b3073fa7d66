"""A device that runs by itself: values from a folder or from lines, timers, and its commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.device.standin import PUBLIC, StandIn, running
from service.device.test_device import CANARY, HASHED, NOON
from serving import wait_for
from sfumato.cli.main import main
from sfumato.device import Device, Http, MemoryBox, SqliteBox
from sfumato.device.outbox import DAY_SECONDS
from sfumato.device.runner import OFFERS_SECONDS, SEND_SECONDS, Runner
from sfumato.errors import SpecError
from sfumato.privacy import SeededRng


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as server:
        server.offer(replace(HASHED, daily_reports=2))
        yield server


@pytest.fixture
def send(server: StandIn) -> Http:
    return Http(server.url)


@pytest.fixture
def device(send: Http) -> Iterator[Device]:
    with Device(MemoryBox(), send, PUBLIC) as device:
        device.offers(NOON)
        device.consent("Street trees")
        yield device


def test_files_of_the_spool_are_recorded_and_deleted(device: Device, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("Street trees\toak\nStreet trees\telm\nBirds\tjay\n")
    (tmp_path / "two").write_bytes(b"no tab\nStreet trees\t\xff\n")
    (tmp_path / "three.part").write_text("Street trees\toak\n")
    (tmp_path / ".four").write_text("Street trees\toak\n")
    runner = Runner(device, spool=tmp_path)
    runner.step(NOON)
    assert runner.report().values == {"kept": 2, "not_offered": 1, "unreadable": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".four", "three.part"]
    runner.step(NOON + 1)
    assert runner.report().values == {}


class PowerCutError(Exception):
    pass


class UnpluggedBox(MemoryBox):
    """The box of a device that may lose its power when it writes."""

    has_power = True

    def write(self, state: str) -> None:
        if not self.has_power:
            raise PowerCutError
        super().write(state)


def test_a_crash_records_no_value_twice(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("Street trees\toak\n")
    box = UnpluggedBox()
    with Device(box, Http(server.url), PUBLIC) as device:
        runner = Runner(device, spool=tmp_path)
        runner.fetch_offers(NOON)
        device.consent("Street trees")
        box.has_power = False
        with pytest.raises(PowerCutError):
            runner.step(NOON)
    assert not list(tmp_path.iterdir())


def test_timers_are_jittered_around_their_mean(device: Device, server: StandIn) -> None:
    """With steps every ten seconds, fetches are 0.5 to 1.5 times the mean apart."""
    runner = Runner(device, rng=SeededRng(1))
    fetches: list[int] = []
    for second in range(0, 40_000, 10):
        before = len(server.requests)
        runner.step(NOON + second)
        fetches += [second] * (len(server.requests) - before)  # nothing is due, nothing is sent
    gaps = [later - earlier for earlier, later in pairwise(fetches)]
    assert len(gaps) >= 5
    assert all(OFFERS_SECONDS / 2 <= gap <= OFFERS_SECONDS * 1.5 + 10 for gap in gaps)
    assert len(set(gaps)) > 1


def test_a_record_is_sent_when_it_is_due_and_a_timer_says_so(
    device: Device, server: StandIn
) -> None:
    runner = Runner(device)
    runner.record(["Street trees\toak\n"], NOON)
    due = (NOON // DAY_SECONDS + 1) * DAY_SECONDS + HASHED.delay_seconds
    for second in range(0, int(due + 2 * SEND_SECONDS - NOON), 60):
        runner.step(NOON + second)
    assert len(server.messages) == 2  # the day's limit, whatever happened
    assert runner.report().sending.delivered == 2


def test_a_runner_takes_part_on_every_day_on_which_it_runs(device: Device, server: StandIn) -> None:
    """On the fourth day, the records of the first three have been sent."""
    runner = Runner(device)
    for hour in range(3 * 24):
        runner.step(NOON // DAY_SECONDS * DAY_SECONDS + hour * 3600)
    runner.record(["Street trees\toak\n"], NOON + DAY_SECONDS)  # one more value changes nothing
    device.send((NOON // DAY_SECONDS + 4) * DAY_SECONDS)
    assert len(server.messages) == 3 * 2


def test_a_runner_continues_without_its_collector(
    device: Device, send: Http, server: StandIn
) -> None:
    server.shutdown()
    server.server_close()
    send.close()  # the open connection
    runner = Runner(device)
    runner.record(["Street trees\toak\n"], NOON)
    runner.step(NOON)
    activity = runner.report()
    assert activity.values == {"kept": 1}
    assert activity.problems == ["the collector did not answer"]


@pytest.mark.parametrize("error", [None, PermissionError(13, "Permission denied")])
def test_a_file_that_another_runner_takes_is_left_out_and_one_that_cannot_be_read_is_refused(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    (tmp_path / "values").write_text("Street trees\toak\n")
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if error is not None:
            raise error
        text = read(path)
        path.unlink()  # by the other one
        return text

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    runner = Runner(device, spool=tmp_path)
    if error is None:
        runner.step(NOON)
        assert not runner.report().values
    else:
        with pytest.raises(SpecError, match="must be readable"):
            runner.step(NOON)


def test_a_spool_that_is_not_a_folder_is_refused(device: Device, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="spool"):
        Runner(device, spool=tmp_path / "none").step(NOON)


def at_home(server: StandIn, folder: Path) -> tuple[str, ...]:
    return ("--home", str(folder / "phone"), "--server", server.url, "--key", PUBLIC.hex())


def output_of(*arguments: str, code: int = 0) -> str:
    """The output of `sfumato device …`, stdout and stderr together."""
    result = CliRunner().invoke(main, ["device", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_commands_of_a_device(server: StandIn, tmp_path: Path) -> None:
    (offered,) = json.loads(output_of("offers", *at_home(server, tmp_path), "--json"))
    assert (offered["study"], offered["consent"]) == ("Street trees", "none")
    home = ("--home", str(tmp_path / "phone"))  # the collector is known from here on
    assert output_of("consent", "Street trees", "--yes", *home) == "Street trees: consent given\n"
    assert output_of("record", "Street trees", "oak", *home) == "kept\n"
    assert json.loads(output_of("log", *home, "--json"))["state"] == "waiting"
    waiting = {"sent": 0, "rejected": 0, "forgotten": 0, "wrong_passcode": 0, "waiting": 2}
    assert json.loads(output_of("send", *home, "--json")) == waiting
    assert output_of("delete", *home) == "deleted 2 records\n"
    assert output_of("withdraw", "Street trees", *home) == "Street trees: consent withdrawn\n"
    assert output_of("record", "Street trees", "oak", *home) == "no_consent\n"


def test_a_home_keeps_to_its_collectors_key(server: StandIn, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "phone"))
    assert "--server and --key" in output_of("log", *home, code=2)
    assert output_of("log", *at_home(server, tmp_path)) == ""
    assert "another key" in output_of("log", *home, "--key", "00" * 32, code=2)
    short = ("--home", str(tmp_path / "other"), "--server", server.url, "--key", "00")
    assert "64 hexadecimal digits" in output_of("log", *short, code=2)
    for text in ("", "[1]"):
        (tmp_path / "phone" / "collector.json").write_text(text)
        assert "collector.json is damaged" in output_of("log", *home, code=2)


def test_consent_is_asked_for(server: StandIn, tmp_path: Path) -> None:
    output_of("offers", *at_home(server, tmp_path))
    question = output_of("consent", "Street trees", "--home", str(tmp_path / "phone"), code=1)
    assert "private at epsilon 4" in question
    assert "Take part?" in question


def agent(server: StandIn, folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sfumato",
            "device",
            "run",
            *at_home(server, folder),
            "--json",
            *options,
        ],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_once_does_one_step_and_stops(server: StandIn, tmp_path: Path) -> None:
    """A record of yesterday is sent, and values from stdin and from the spool are recorded."""
    (tmp_path / "phone").mkdir()
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "values").write_text("Street trees\tash\n")
    long_ago = time.time() - 3 * DAY_SECONDS
    with Device(SqliteBox(tmp_path / "phone" / "device.db"), Http(server.url), PUBLIC) as device:
        device.offers(long_ago)
        device.consent("Street trees")
        device.record("Street trees", "oak", long_ago)
    process = agent(server, tmp_path, "--once", "--stdin", "--spool", "spool")
    out, err = process.communicate(f"Street trees\telm\n{CANARY}\n", timeout=60)
    assert process.returncode == 0, err
    counts = json.loads(out)
    assert counts["values"] == {"kept": 2, "unreadable": 1}
    assert counts["sent"] == 2
    assert CANARY not in out + err
    assert not list((tmp_path / "spool").iterdir())
    assert len(server.messages) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_agent_cleanly(
    server: StandIn, tmp_path: Path, number: signal.Signals
) -> None:
    server.offer(replace(HASHED, daily_reports=50))
    output_of("offers", *at_home(server, tmp_path))
    output_of("consent", "Street trees", "--yes", "--home", str(tmp_path / "phone"))
    before = len(server.requests)
    process = agent(server, tmp_path, "--stdin")
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        wait_for(lambda: len(server.requests) > before, "a fetch of the offers")
        process.stdin.write("Street trees\toak\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["values"] == {"kept": 1}
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert (process.returncode, out, err) == (0, "", "")


def test_nothing_is_fetched_or_sent_while_the_conditions_do_not_hold(
    device: Device, server: StandIn, tmp_path: Path
) -> None:
    """Values are recorded, and days begin, as always: the number of records does not tell."""
    is_charging = False
    runner = Runner(device, spool=tmp_path, may_send=lambda: is_charging, rng=SeededRng(1))
    (tmp_path / "one").write_text("Street trees\toak\n")
    before = len(server.requests)
    for hour in range(72):
        runner.step(NOON + hour * 3_600)
    assert len(server.requests) == before
    assert runner.report().values == {"kept": 1}
    waiting = [entry for entry in device.log() if entry.state == "waiting"]
    assert sum(len(entry.records) for entry in waiting) == 2 * 4  # four days began
    is_charging = True
    for quarter in range(8):  # a fetch and an upload are at most 1.5 quarters away
        runner.step(NOON + 72 * 3_600 + quarter * SEND_SECONDS)
    assert runner.report().sending.delivered == 2 * 3
    assert {request[0] for request in server.requests[before:]} == {"GET", "POST"}


@pytest.mark.parametrize(("command", "count"), [("true", 2), ("false", 0)])
def test_a_command_tells_when_to_send(
    server: StandIn, tmp_path: Path, command: str, count: int
) -> None:
    options = ["--home", str(tmp_path), "--server", server.url, "--key", PUBLIC.hex()]
    for arguments in (["offers"], ["consent", "Street trees", "--yes"]):
        assert CliRunner().invoke(main, ["device", *arguments, *options]).exit_code == 0
    with Device(SqliteBox(tmp_path / "device.db"), Http(server.url), PUBLIC) as device:
        device.record("Street trees", "oak", time.time() - 3 * DAY_SECONDS)
    run = ["device", "run", "--once", "--json", "--when", command, *options]
    done = CliRunner().invoke(main, run)
    assert done.exit_code == 0, done.output
    assert len(server.reports) == count


def test_a_condition_that_cannot_run_is_an_error(server: StandIn, tmp_path: Path) -> None:
    options = ["--home", str(tmp_path), "--server", server.url, "--key", PUBLIC.hex()]
    for command, message in (
        ("", "must be a command"),
        ("a'b", "its quoting is wrong"),
        ("/nowhere/at-all", "cannot run"),
    ):
        done = CliRunner().invoke(main, ["device", "run", "--once", "--when", command, *options])
        assert done.exit_code == 2
        assert message in done.output


def test_the_log_prints_each_record_and_how_it_was_made(server: StandIn, tmp_path: Path) -> None:
    options = ["--home", str(tmp_path), "--server", server.url, "--key", PUBLIC.hex()]
    for arguments in (["offers"], ["consent", "Street trees", "--yes"]):
        assert CliRunner().invoke(main, ["device", *arguments, *options]).exit_code == 0
    recorded = CliRunner().invoke(main, ["device", "record", "Street trees", CANARY, *options])
    assert recorded.output == "kept\n"
    output = CliRunner().invoke(main, ["device", "send", *options]).output
    assert output == "sent 0, rejected 0, forgotten 0, wrong_passcode 0, waiting 2\n"
    (entry,) = [
        json.loads(line)
        for line in CliRunner()
        .invoke(main, ["device", "log", "--json", *options])
        .output.split("\n")
        if line
    ]
    assert [record["algorithm"] for record in entry["records"]] == ["hashed_response"] * 2
    lines = CliRunner().invoke(main, ["device", "log", *options]).output.splitlines()
    assert lines[0].startswith("waiting: 2 records")
    assert lines[1:] == [
        f"  hashed_response epsilon 4.0 rows 1024 width 56: {record['row']},{record['data']}"
        for record in entry["records"]
    ]
    assert CANARY not in json.dumps(entry)


def test_a_value_for_a_study_that_is_not_offered_is_an_error(
    server: StandIn, tmp_path: Path
) -> None:
    options = ["--home", str(tmp_path), "--server", server.url, "--key", PUBLIC.hex()]
    offers = CliRunner().invoke(main, ["device", "offers", *options]).output
    assert "; exactly 2 are sent for each day on which you take part" in offers
    for command in ("record", "join"):
        done = CliRunner().invoke(main, ["device", command, "Street tree", CANARY, *options])
        assert (done.exit_code, done.stdout) == (1, "not_offered\n")
        assert "'Street tree' is not" in done.stderr
        assert "sfumato device offers lists" in done.stderr
        assert CANARY not in done.output


def test_a_value_is_recorded_with_its_segment(server: StandIn, tmp_path: Path) -> None:
    server.offer(replace(HASHED, segments=("en", "fr")))
    options = ["--home", str(tmp_path), "--server", server.url, "--key", PUBLIC.hex()]
    terms = CliRunner().invoke(main, ["device", "offers", *options]).output
    assert "it asks which of these you belong to, too: en, fr" in terms
    assert CliRunner().invoke(main, ["device", "consent", "Street trees", "--yes", *options])
    record = ["device", "record", "Street trees", "oak", *options]
    assert CliRunner().invoke(main, record).exit_code == 2
    assert CliRunner().invoke(main, [*record, "--segment", "fr"]).output == "kept\n"
    with Device(SqliteBox(tmp_path / "device.db"), Http(server.url), PUBLIC) as device:
        runner = Runner(device)
        runner.record(["Street trees\tfr\toak\n", "Street trees\toak\n"], time.time())
        assert runner.report().values["unreadable"] == 1
