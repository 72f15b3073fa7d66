"""An agent by itself: values from a folder or from lines, timers, and the commands of a device."""

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
def device(server: StandIn) -> Iterator[Device]:
    with Device(MemoryBox(), Http(server.url), PUBLIC) as device:
        device.offers(NOON)
        device.consent("Street trees")
        yield device


def test_files_of_the_spool_are_recorded_and_gone(device: Device, tmp_path: Path) -> None:
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


class Unplugged(MemoryBox):
    """A box of a device that loses its power when it writes."""

    def write(self, state: str) -> None:
        raise PowerCutError


def test_a_crash_records_no_value_twice(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("Street trees\toak\n")
    with Device(Unplugged(), Http(server.url), PUBLIC) as device:
        runner = Runner(device, spool=tmp_path)
        with pytest.raises(PowerCutError):
            runner._take(NOON)
    assert not list(tmp_path.iterdir())


def test_timers_are_jittered_around_their_mean(device: Device, server: StandIn) -> None:
    """Steps ten seconds apart: between two looks there is half to one and a half of the mean."""
    runner = Runner(device, rng=SeededRng(1))
    looks: list[int] = []
    for second in range(0, 40_000, 10):
        before = len(server.requests)
        runner.step(NOON + second)
        looks += [second] * (len(server.requests) - before)  # nothing is due, so nothing is sent
    gaps = [later - earlier for earlier, later in pairwise(looks)]
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
    assert len(server.messages) == 2  # of the day, whatever happened on it
    assert runner.report().sending.sent == 2


def test_a_runner_takes_part_on_every_day_on_which_it_runs(device: Device, server: StandIn) -> None:
    """On the fourth day, what is of the three before it has been sent."""
    runner = Runner(device)
    for hour in range(3 * 24):
        runner.step(NOON // DAY_SECONDS * DAY_SECONDS + hour * 3600)
    runner.record(["Street trees\toak\n"], NOON + DAY_SECONDS)  # a value more changes nothing
    device.send((NOON // DAY_SECONDS + 4) * DAY_SECONDS)
    assert len(server.messages) == 3 * 2


def test_a_collector_that_is_away_is_a_problem_and_no_end(device: Device, server: StandIn) -> None:
    server.shutdown()
    server.server_close()
    device._send.close()  # type: ignore[attr-defined]  # the connection that was kept
    runner = Runner(device)
    runner.record(["Street trees\toak\n"], NOON)
    runner.step(NOON)
    done = runner.report()
    assert done.values == {"kept": 1}
    assert done.problems == ["the collector did not answer"]


def test_a_spool_that_is_no_folder_is_refused(device: Device, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="spool"):
        Runner(device, spool=tmp_path / "none").step(NOON)


def at_home(server: StandIn, folder: Path) -> tuple[str, ...]:
    return ("--home", str(folder / "phone"), "--server", server.url, "--key", PUBLIC.hex())


def told(*arguments: str, code: int = 0) -> str:
    """What `sfumato device …` prints, in this process; data and the rest in one text."""
    done = CliRunner().invoke(main, ["device", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_the_commands_of_a_device(server: StandIn, tmp_path: Path) -> None:
    (offered,) = json.loads(told("offers", *at_home(server, tmp_path), "--json"))
    assert (offered["study"], offered["consent"]) == ("Street trees", "none")
    home = ("--home", str(tmp_path / "phone"))  # the collector is known from here on
    assert told("consent", "Street trees", "--yes", *home) == "Street trees: consent given\n"
    assert told("record", "Street trees", "oak", *home) == "kept\n"
    assert json.loads(told("log", *home, "--json"))["state"] == "waiting"
    nothing = {"sent": 0, "rejected": 0, "forgotten": 0, "kept": 0}
    assert json.loads(told("send", *home, "--json")) == nothing
    assert told("delete", *home) == "deleted 2 records\n"
    assert told("withdraw", "Street trees", *home) == "Street trees: consent withdrawn\n"
    assert told("record", "Street trees", "oak", *home) == "no_consent\n"


def test_a_home_keeps_to_its_collectors_key(server: StandIn, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "phone"))
    assert "--server and --key" in told("log", *home, code=2)
    assert told("log", *at_home(server, tmp_path)) == ""
    assert "another key" in told("log", *home, "--key", "00" * 32, code=2)
    short = ("--home", str(tmp_path / "other"), "--server", server.url, "--key", "00")
    assert "64 hexadecimal digits" in told("log", *short, code=2)


def test_consent_is_asked_for(server: StandIn, tmp_path: Path) -> None:
    told("offers", *at_home(server, tmp_path))
    asked = told("consent", "Street trees", "--home", str(tmp_path / "phone"), code=1)
    assert "private at epsilon 4" in asked
    assert "Take part?" in asked


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


def test_once_does_what_is_to_be_done_and_stops(server: StandIn, tmp_path: Path) -> None:
    """A record of yesterday is sent, and values of stdin and of the spool are recorded."""
    (tmp_path / "phone").mkdir()
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "values").write_text("Street trees\tash\n")
    long_ago = time.time() - 3 * DAY_SECONDS
    with Device(SqliteBox(tmp_path / "phone" / "device.db"), Http(server.url), PUBLIC) as device:
        device.offers(long_ago)
        device.consent("Street trees")
        device.record("Street trees", "oak", long_ago)
    started = agent(server, tmp_path, "--once", "--stdin", "--spool", "spool")
    out, err = started.communicate(f"Street trees\telm\n{CANARY}\n", timeout=60)
    assert started.returncode == 0, err
    done = json.loads(out)
    assert done["values"] == {"kept": 2, "unreadable": 1}
    assert done["sent"] == 2
    assert CANARY not in out + err
    assert not list((tmp_path / "spool").iterdir())
    assert len(server.messages) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_agent_cleanly(
    server: StandIn, tmp_path: Path, number: signal.Signals
) -> None:
    server.offer(replace(HASHED, daily_reports=50))
    told("offers", *at_home(server, tmp_path))
    told("consent", "Street trees", "--yes", "--home", str(tmp_path / "phone"))
    before = len(server.requests)
    started = agent(server, tmp_path, "--stdin")
    try:
        assert started.stdin is not None
        assert started.stdout is not None
        wait_for(lambda: len(server.requests) > before, "a look at the offers")
        started.stdin.write("Street trees\toak\n")
        started.stdin.flush()
        assert json.loads(started.stdout.readline())["values"] == {"kept": 1}
        os.kill(started.pid, number)
        out, err = started.communicate(timeout=30)
    finally:
        if started.poll() is None:
            started.kill()
            started.communicate()
    assert (started.returncode, out, err) == (0, "", "")
