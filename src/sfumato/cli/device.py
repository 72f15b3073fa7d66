"""Commands of a device, a thin layer over `sfumato.device`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from queue import Empty, SimpleQueue
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sfumato.cli import passcodes
from sfumato.cli.printing import FILE, json_option, print_json, print_result
from sfumato.errors import OfferError, SpecError

if TYPE_CHECKING:
    from sfumato.device import Device, OfferedStudy
    from sfumato.device.runner import Activity, Runner

_Command = TypeVar("_Command", bound=Callable[..., Any])
_segment = click.option("--segment", help="The value's segment, for a study with segments.")
_SPOOL_SECONDS = 1.0  # the time between two steps of a runner


def _device(command: _Command) -> _Command:
    """Add the options that a command needs to pass it the `device` in --home."""

    @click.option(
        "--home",
        required=True,
        type=FILE,
        envvar="SFUMATO_DEVICE_HOME",
        help="Folder of the device.",
    )
    @click.option("--server", envvar="SFUMATO_SERVER", help="Address of its collector.")
    @click.option("--key", envvar="SFUMATO_SERVER_KEY", help="The collector's public key, in hex.")
    @click.option("--ca", type=FILE, help="Root certificates to use instead of the system's.")
    @click.option("--plain-http", is_flag=True, help="Allow plain http to other machines.")
    @json_option
    @wraps(command)
    def with_device(
        home: Path,
        server: str | None,
        key: str | None,
        ca: Path | None,
        plain_http: bool,
        **options: Any,
    ) -> Any:
        from sfumato.device import Device

        server, key = _pin(home, server, key)
        with Device.open(
            home / "device.db", server, public_key(key), ca=ca, allow_plain=plain_http
        ) as device:
            return command(device=device, **options)

    return with_device  # type: ignore[return-value]  # click adds the other arguments


@click.group("device")
def device_group() -> None:
    """Act as a device: consent to studies, record values, send reports

    A device keeps its state in a folder (--home). The first command must give the collector's
    address and public key (--server, --key). They are stored there, and any other key is refused
    from then on.

    \b
    Example:
      sfumato device offers --home phone --server https://collector.example --key 5c…0d
      sfumato device consent "Street trees" --home phone
    """


@device_group.command("offers")
@_device
def offers_command(device: Device, as_json: bool) -> None:
    """List the studies that the collector offers, and their terms

    Offers that the collector's key has not signed are left out, with a message on stderr.

    \b
    Example:
      sfumato device offers --home phone
    """
    offers = device.offers(time.time())
    for reason in device.refused:
        click.echo(f"refused: {reason}", err=True)
    if as_json:
        print_json([_plain(study) for study in offers])
        return
    for study in offers:
        click.echo(describe(study))
    if not offers:
        click.echo("no study is open", err=True)


@device_group.command("consent")
@click.argument("study")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_device
def consent_command(device: Device, study: str, yes: bool, as_json: bool) -> None:
    """Consent to a study on the terms of its offer

    \b
    Example:
      sfumato device consent "Street trees" --home phone --yes
    """
    studies = {each.offer.study: each for each in device.known_offers()}
    if study in studies and not yes:
        click.echo(describe(studies[study]), err=True)
        click.confirm("Take part?", abort=True, err=True)
    device.consent(study)
    print_result({"study": study, "consent": "given"}, f"{study}: consent given", as_json)


@device_group.command("withdraw")
@click.argument("study")
@_device
def withdraw_command(device: Device, study: str, as_json: bool) -> None:
    """Withdraw consent, and delete unsent records

    \b
    Example:
      sfumato device withdraw "Street trees" --home phone
    """
    device.withdraw(study)
    print_result({"study": study, "consent": "none"}, f"{study}: consent withdrawn", as_json)


@device_group.command("passcode")
@click.argument("study")
@click.argument("file", type=FILE)
@_device
def passcode_command(device: Device, study: str, file: Path, as_json: bool) -> None:
    """Store the passcode of a study that is not open to everybody

    FILE has the passcode, from whoever runs the study; - is stdin. It replaces an earlier one.

    \b
    Example:
      sfumato device passcode "Street trees" trees.passcode --home phone
    """
    device.set_passcode(study, passcodes.read(file))
    print_result({"study": study, "passcode": True}, f"{study}: passcode stored", as_json)


@device_group.command("record")
@click.argument("study")
@click.argument("value", default="-")
@_segment
@_device
def record_command(
    device: Device, study: str, value: str, segment: str | None, as_json: bool
) -> None:
    """Privatise a value, and keep the result to be sent later

    VALUE is read from a line of stdin if it is not given, so that it does not appear in the list of
    processes. Prints what became of it: kept, no_consent, … (see the guide on devices). The exit
    code is 1 if the study is not offered.

    \b
    Example:
      echo oak | sfumato device record "Street trees" --home phone
    """
    outcome = device.record(study, _value(value, segment), time.time())
    _print_outcome(study, outcome, as_json)


@device_group.command("join")
@click.argument("study")
@click.argument("value", default="-")
@_segment
@_device
def join_command(
    device: Device, study: str, value: str, segment: str | None, as_json: bool
) -> None:
    """Take part in a masked round of a study

    Waits for other devices, and returns when the round is over for this one. To continue an
    interrupted round, run the same command again. VALUE is read from a line of stdin if it is not
    given. Prints how the round ended: done, not_needed, aborted, … (see the guide on devices). The
    exit code is 1 if the study is not offered.

    \b
    Example:
      echo oak | sfumato device join "Street trees" --home phone
    """
    outcome = device.join(study, _value(value, segment), time.time())
    _print_outcome(study, outcome, as_json)


def _print_outcome(study: str, outcome: str, as_json: bool) -> None:
    """Print what became of a value; OfferError if its study is not offered."""
    print_result({"study": study, "outcome": str(outcome)}, str(outcome), as_json)
    if outcome == "not_offered":
        raise OfferError(
            f"a value must be for a study that is offered; {study!r} is not",
            hint="sfumato device offers lists the studies; use the name as it appears there",
        )


@device_group.command("send")
@_device
def send_command(device: Device, as_json: bool) -> None:
    """Send the records that are due

    Prints how many were sent, and how many are waiting: those that are due later, too.
    A record is due at a random time after its day. Records that the collector does not acknowledge
    are kept for the next call.

    \b
    Example:
      sfumato device send --home phone
    """
    counts = device.send(time.time()).to_dict()
    del counts["kept"]  # the due ones of those that wait
    unsent = (entry for entry in device.log() if entry.state != "sent")
    counts["waiting"] = sum(len(entry.records) for entry in unsent)
    print_result(counts, ", ".join(f"{name} {count}" for name, count in counts.items()), as_json)


@device_group.command("log")
@_device
def log_command(device: Device, as_json: bool) -> None:
    """Show the records sent and waiting, and their privacy cost

    Each record is shown with the algorithm that made it, its epsilon, the sizes of its table, its
    row and its bytes in hexadecimal: exactly what the collector gets.

    \b
    Example:
      sfumato device log --home phone
    """
    for entry in device.log():
        records = [
            {"task": task, "data": data.hex(), **device.explain(task, data)}
            for task, data in entry.records
        ]
        plain = {
            "state": entry.state,
            "study": entry.study,
            "day": entry.day,
            "records": records,
            "epsilon": entry.epsilon if entry.epsilon < float("inf") else None,
        }
        lines = [str(entry), *(f"  {_record_line(record)}" for record in records)]
        print_result(plain, "\n".join(lines), as_json)


@device_group.command("delete")
@click.argument("study", required=False)
@_device
def delete_command(device: Device, study: str | None, as_json: bool) -> None:
    """Delete unsent records, of one study or of all

    \b
    Example:
      sfumato device delete --home phone
    """
    count = device.delete(study)
    print_result({"deleted": count}, f"deleted {count} records", as_json)


@device_group.command("run")
@click.option("--spool", type=FILE, help="Folder to read files of values from.")
@click.option("--stdin", "from_stdin", is_flag=True, help="Read values from lines of stdin.")
@click.option("--once", is_flag=True, help="Do one step, and exit.")
@click.option("--when", metavar="COMMAND", help="Fetch and send only while this command succeeds.")
@_device
def run_command(
    device: Device,
    spool: Path | None,
    from_stdin: bool,
    once: bool,
    when: str | None,
    as_json: bool,
) -> None:
    """Run continuously: fetch offers, record values, send reports

    Values come as lines STUDY<TAB>VALUE, from files in --spool (each is deleted once it is read) or
    from stdin. Offers are fetched about once an hour, and records are sent at random times. SIGTERM
    and Ctrl-C stop it between two steps. Prints counts of what it did to stdout.

    --when is a command that tells whether the device may use the network now, by its exit code 0:
    whether it is charging, idle, or on a network without fees.

    \b
    Example:
      sfumato device run --home phone --spool phone/spool --once
      sfumato device run --home phone --spool phone/spool --when systemd-ac-power
    """
    from sfumato.device.runner import Runner

    runner = Runner(device, spool=spool, may_send=None if when is None else _condition(when))
    if once:
        if from_stdin:
            runner.fetch_offers(time.time())
            runner.record(sys.stdin, time.time())
        runner.step(time.time())
        _print_activity(runner.report(), as_json)
        return
    _run(runner, from_stdin, as_json)


def _condition(command: str) -> Callable[[], bool]:
    """Whether a command succeeds, each time it is asked; it gets no input, and prints nothing."""
    try:
        words = shlex.split(command)
    except ValueError as problem:
        raise SpecError(f"--when must be a command; its quoting is wrong: {problem}") from None
    if not words:
        raise SpecError("--when must be a command; got an empty one")

    def succeeds() -> bool:
        try:
            done = subprocess.run(words, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
            return done.returncode == 0
        except OSError as problem:
            raise SpecError(f"the command of --when cannot run: {problem.strerror}") from None

    return succeeds


def _value(value: str, segment: str | None) -> str:
    """The value of a command, from stdin if it is "-", with its segment if it has one."""
    text = sys.stdin.readline().rstrip("\r\n") if value == "-" else value
    if segment is None:
        return text
    from sfumato.flow.segments import pair

    return pair(segment, text)


def _run(runner: Runner, from_stdin: bool, as_json: bool) -> None:
    """Record lines as they come, and run steps, until a signal."""
    lines: SimpleQueue[str | None] = SimpleQueue()  # None: stop; `put` is safe in signal handlers

    def stop(number: int, frame: object) -> None:
        lines.put(None)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    if from_stdin:
        threading.Thread(target=_read, args=(lines,), daemon=True).start()
    try:
        while True:
            runner.step(time.time())
            _print_activity(runner.report(), as_json)
            try:
                line = lines.get(timeout=_SPOOL_SECONDS)
            except Empty:
                continue
            if line is None:
                return
            runner.record([line], time.time())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _read(lines: SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        lines.put(line)


def _print_activity(activity: Activity, as_json: bool) -> None:
    data = activity.to_dict()
    for problem in activity.problems:
        click.echo(f"problem: {problem}", err=True)
    counts = {name: value for name, value in data.items() if value and name != "problems"}
    if as_json and (counts or activity.problems):
        print_json(data)
    elif counts:
        click.echo(", ".join(f"{name} {json.dumps(value)}" for name, value in counts.items()))
    sys.stdout.flush()


def _pin(home: Path, server: str | None, key: str | None) -> tuple[str, str]:
    """The address and the key of this home's collector, which the first command stores."""
    path = home / "collector.json"
    pins: dict[str, str] = {}
    if path.exists():
        try:
            pins = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            raise SpecError(
                f"{path} is damaged: it must have the address and the key of a collector",
                hint="delete it, and give --server and --key again",
            ) from None
    server, key = server or pins.get("server"), key or pins.get("key")
    if server is None or key is None:
        raise SpecError(
            f"the device in {home} does not know its collector yet",
            hint="give --server and --key once; they are stored",
        )
    if key != pins.get("key", key):
        raise SpecError(
            f"the device in {home} belongs to a collector with another key",
            hint="use another --home for another collector",
        )
    if pins != {"key": key, "server": server}:
        public_key(key)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_suffix(".tmp")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "server": server}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    return server, key


def public_key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise SpecError(
            "a collector's public key must be 64 hexadecimal digits; got something else"
        )
    return key


def _record_line(record: dict[str, Any]) -> str:
    """A record of the log in one line: how it was made, and its text."""
    parts = record.get("parts", {"": record})
    origins = [
        " ".join(
            f"{key} {part[key]}" if key != "algorithm" else f"{name} {part[key]}".strip()
            for key in ("algorithm", "epsilon", "rows", "width")
            if part.get(key) is not None
        )
        for name, part in parts.items()
    ]
    head = f"{record['algorithm']}: " if "parts" in record else ""
    return f"{head}{', '.join(origins)}: {record['record']}" if any(origins) else record["record"]


def _plain(study: OfferedStudy) -> dict[str, Any]:
    offer = study.offer
    names = (
        "study", "purpose", "question", "trust", "epsilon", "delta", "daily_reports",
        "delay_seconds", "lifetime_epsilon", "items_per_report", "closes", "masked", "passcode",
        "segments",
    )  # fmt: skip
    terms = {name: getattr(offer, name) for name in names}
    if offer.model is not None:
        terms["model"] = {"name": offer.model.model, "parameters": offer.model.parameters}
    return {**terms, "task": offer.task.id, "consent": study.consent, "changes": study.changes}


def describe(study: OfferedStudy) -> str:
    """The terms of a study, for a user to read before they consent."""
    offer = study.offer
    if offer.epsilon is None:
        terms = (
            "the collector can read your reports"
            if not offer.task.is_masked
            else "the collector can read only sums over many devices, not your reports"
        )
        times = "once" if offer.contributions == 1 else f"at most {offer.contributions} times"
        terms += f"; you send {times}"
        if offer.model is not None:
            terms += (
                f" an update of a model ({offer.model.model}, {offer.model.parameters:,} "
                "parameters), computed from your examples"
            )
    else:
        verb = "is" if offer.daily_reports == 1 else "are"
        terms = (
            f"each record is private at epsilon {offer.epsilon:g}; exactly {offer.daily_reports} "
            f"{verb} sent for each day on which you take part"
        )
        if offer.lifetime_epsilon is not None:
            terms += f", and never more than epsilon {offer.lifetime_epsilon:g} in total"
    if offer.segments:
        terms += f"\n  it asks which of these you belong to, too: {', '.join(offer.segments)}"
    if offer.passcode:
        terms += "\n  only devices that have its passcode take part"
    state = {
        "none": "you do not take part",
        "given": "you take part",
        "again": f"needs your consent again: changed {', '.join(study.changes)}",
    }[study.consent]
    return f"{offer.study}: {offer.purpose}\n  {terms}\n  {state}"
