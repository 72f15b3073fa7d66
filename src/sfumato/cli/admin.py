"""Commands for a running collector: its studies, its releases, its ledger."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, date, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sfumato.cli import passcodes
from sfumato.cli.printing import (
    FILE,
    NEW_FILE,
    json_option,
    print_json,
    print_release,
    print_result,
)
from sfumato.errors import SpecError
from sfumato.privacy.accounting import epsilon_text
from sfumato.study import TRUSTS

if TYPE_CHECKING:  # slow to import
    from sfumato.collector.client import AdminClient

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DAY_ZERO = date(1970, 1, 1)
_yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def _client(command: _Command) -> _Command:
    """Add the options that a command needs to pass it a `client` of a running collector."""

    @click.option(
        "--server",
        envvar="SFUMATO_SERVER",
        default="http://127.0.0.1:8420",
        show_default=True,
        help="Address of the collector.",
    )
    @click.option("--ca", type=FILE, help="Root certificates to trust in addition.")
    @click.option("--plain-http", is_flag=True, help="Allow sending the token without TLS.")
    @wraps(command)
    def with_client(server: str, ca: Path | None, plain_http: bool, **options: Any) -> Any:
        return command(client=_connect(server, ca, plain_http), **options)

    return with_client  # type: ignore[return-value]  # click adds the other arguments


@click.group("study")
def study_group() -> None:
    """Open, watch, close, retry and delete the studies of a collector

    Give the collector's address as --server or SFUMATO_SERVER, and the token as SFUMATO_TOKEN.

    \b
    Example:
      sfumato study create study.toml --name "Street trees" --purpose "Which trees to plant next."
    """


@study_group.command("create")
@click.argument("study", type=FILE)
@click.option("--name", required=True, help="Name shown to users, who consent to it.")
@click.option("--purpose", required=True, help="One sentence, shown to users.")
@click.option(
    "--daily-reports",
    type=click.IntRange(min=1),
    help="Reports per device and day. Default: the study's.",
)
@click.option(
    "--delay-seconds",
    type=click.IntRange(min=1),
    default=86_400,
    show_default=True,
    help="Longest random delay of a report after its day.",
)
@click.option("--lifetime-epsilon", type=float, help="Total epsilon that one device may spend.")
@click.option("--closes", type=click.DateTime(["%Y-%m-%d"]), help="Last day for reports.")
@click.option(
    "--open-seconds",
    type=click.IntRange(min=1),
    help="How long each task takes reports, even if it is full.",
)
@click.option(
    "--minimum",
    type=click.IntRange(min=1),
    help="Reports that suffice after --open-seconds. Default: as many as planned.",
)
@click.option(
    "--passcode",
    type=FILE,
    help="File with a passcode that devices need; created if it is missing.",
)
@_client
@json_option
def study_create(
    client: AdminClient,
    study: Path,
    name: str,
    purpose: str,
    daily_reports: int | None,
    delay_seconds: int,
    lifetime_epsilon: float | None,
    closes: datetime | None,
    open_seconds: int | None,
    minimum: int | None,
    passcode: Path | None,
    as_json: bool,
) -> None:
    """Open a study to devices

    STUDY is a TOML file; the dictionary that it names is read here and sent. With --passcode, only
    devices that have the passcode in that file take part; the collector gets its SHA-256. Repeating
    the same command has no effect.

    \b
    Example:
      sfumato study create study.toml --name "Street trees" --purpose "Which trees to plant next."
    """
    from sfumato.collector.client import study_keys
    from sfumato.device.passcodes import digest

    keys = study_keys(study)
    code = None if passcode is None else digest(passcodes.read_or_create(passcode)).hex()
    row = client.create_study(
        {
            "name": name,
            "purpose": purpose,
            **keys,
            "daily_reports": daily_reports,
            "delay_seconds": delay_seconds,
            "lifetime_epsilon": lifetime_epsilon,
            "closes": None if closes is None else (closes.date() - _DAY_ZERO).days,
            "open_seconds": open_seconds,
            "minimum": minimum,
            "passcode_digest": code,
        }
    )
    _print_study(row, as_json)


@study_group.command("list")
@_client
@json_option
def study_list(client: AdminClient, as_json: bool) -> None:
    """List the studies and their states

    \b
    Example:
      sfumato study list --json
    """
    rows = client.studies()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        failing = "  (failing)" if row["fault"] else ""
        click.echo(f"{row['id']}  {row['state']:<10}  {row['name']}{failing}")


@study_group.command("show")
@click.argument("study", metavar="ID")
@_client
@json_option
def study_show(client: AdminClient, study: str, as_json: bool) -> None:
    """Show a study: its state, its reports, its plan

    ID is the study's id or its name.

    \b
    Example:
      sfumato study show "Street trees"
    """
    _print_study(client.study(client.id_of(study)), as_json)


@study_group.command("passcode")
@click.argument("study", metavar="ID")
@click.argument("file", type=FILE)
@_client
@json_option
def study_passcode(client: AdminClient, study: str, file: Path, as_json: bool) -> None:
    """Replace the passcode of a study, for example if strangers know it

    The new one is in FILE, which is created if it is missing, and used as it is if not. Devices
    with the old one are refused from now on; their reports wait until they have the new one. ID is
    the study's id or its name.

    \b
    Example:
      sfumato study passcode "Street trees" new.passcode
    """
    study_id = client.id_of(study)
    _print_study(client.replace_passcode(study_id, passcodes.read_or_create(file)), as_json)


@study_group.command("close")
@click.argument("study", metavar="ID")
@_yes
@_client
@json_option
def study_close(client: AdminClient, study: str, yes: bool, as_json: bool) -> None:
    """Stop collecting reports, and release the result

    ID is the study's id or its name.
    \b
    Example:
      sfumato study close "Street trees" --yes
    """
    row = client.study(client.id_of(study))
    if row["state"] == "released":
        click.echo(f"{row['name']} is released already; nothing was done", err=True)
        _print_study(row, as_json)
        return
    if row["state"] == "collecting":
        _confirm(f"this releases the result of {_reports(row)} reports{_cost(row)}; close it?", yes)
    _print_study(client.close_study(row["id"]), as_json)


@study_group.command("retry")
@click.argument("study", metavar="ID")
@_yes
@_client
@json_option
def study_retry(client: AdminClient, study: str, yes: bool, as_json: bool) -> None:
    """Try a study again at once after an error

    A study that is failing is tried again by itself, after pauses of up to 15 minutes; this command
    ends the pause. A study that failed is released after all, if it still has its reports and what
    made it fail is mended. Charges that it has paid are not paid again. To give up, delete the
    study. ID is the study's id or its name.

    \b
    Example:
      sfumato study retry "Street trees"
    """
    row = client.study(client.id_of(study))
    if row["state"] == "failed":
        _confirm(f"this releases the result of {_reports(row)} reports{_cost(row)}; retry?", yes)
    _print_study(client.retry_study(row["id"]), as_json)


@study_group.command("delete")
@click.argument("study", metavar="ID")
@_yes
@_client
@json_option
def study_delete(client: AdminClient, study: str, yes: bool, as_json: bool) -> None:
    """Delete all reports of a study

    Its release, if there is one, and its entries in the ledger stay. ID is the study's id or its
    name.

    \b
    Example:
      sfumato study delete "Street trees" --yes
    """
    row = client.study(client.id_of(study))
    _confirm(f"this permanently deletes {row['received']:,} reports; delete them?", yes)
    _print_study(client.delete_study(row["id"]), as_json)


@click.group("release")
def release_group() -> None:
    """Show and export the releases of a collector

    \b
    Example:
      sfumato release show "Street trees"
    """


@release_group.command("show")
@click.argument("study", metavar="ID")
@_client
@json_option
def release_show(client: AdminClient, study: str, as_json: bool) -> None:
    """Show a study's release: estimates with intervals, largest first

    ID is the study's id or its name. Exits with code 75 if there is no release yet.

    \b
    Example:
      sfumato release show "Street trees" --json
    """
    from sfumato.questions.registry import read_release

    data = client.release(client.id_of(study))
    if as_json:
        print_json(data)
    else:
        print_release(read_release(data), as_json=False)


@release_group.command("export")
@click.argument("study", metavar="ID")
@click.option(
    "--to", "file", type=NEW_FILE, required=True, help="File: .json, .csv, .parquet, .png or .pt."
)
@_client
@json_option
def release_export(client: AdminClient, study: str, file: Path, as_json: bool) -> None:
    """Write a study's release to a file

    ID is the study's id or its name. The file's ending is its format: JSON has everything; CSV the
    estimates; Parquet the estimates, with the rest in its metadata; PNG a plot of the largest. For
    a model, JSON has its description, and .pt its parameters, for PyTorch's load_state_dict.

    \b
    Example:
      sfumato release export "Street trees" --to trees.parquet
    """
    from sfumato.flow.release import MODEL_ENDING, EstimateRelease
    from sfumato.questions.registry import read_release

    ending, endings = file.suffix.removeprefix("."), (*EstimateRelease.endings, MODEL_ENDING)
    if ending not in endings:
        raise SpecError(f"the file's name must end in .{', .'.join(endings)}; got {file}")
    study_id = client.id_of(study)
    data = client.release(study_id)
    if ending == MODEL_ENDING:
        from sfumato.learn.models import state_file

        content = state_file(data, client.model(study_id))
    else:
        content = read_release(data).export(ending)
    try:
        file.write_bytes(content)
    except OSError as problem:
        raise SpecError(f"{file} cannot be written: {problem.strerror}") from problem
    result = {"wrote": str(file), "estimates": len(data.get("estimates", ()))}
    print_result(result, f"wrote {file}", as_json)


@click.group("ledger")
def ledger_group() -> None:
    """Show how much of the privacy budget a collector has spent

    \b
    Example:
      sfumato ledger show
    """


@ledger_group.command("show")
@_client
@json_option
def ledger_show(client: AdminClient, as_json: bool) -> None:
    """Show the charges, and how much of the budget is spent

    One line per charge: its study, its cohort and its epsilon, as if there were no others. They do
    not simply add up: the last line has what all cost the device that was asked most.

    \b
    Example:
      sfumato ledger show --json
    """
    ledger = client.ledger()
    if as_json:
        print_json(ledger)
        return
    names = [entry["study"] or entry["campaign"][:12] for entry in ledger["entries"]]
    width = max(map(len, names), default=0)
    for name, entry in zip(names, ledger["entries"], strict=True):
        cost = (
            "without bound"
            if entry["epsilon"] is None
            else f"epsilon {epsilon_text(entry['epsilon'])}"
        )
        click.echo(f"{name:<{width}}  {entry['cohort']:<12}  {cost}")
    spent = (
        "without bound" if ledger["spent"] is None else f"epsilon {epsilon_text(ledger['spent'])}"
    )
    budget = "no limit" if ledger["epsilon"] is None else f"epsilon {ledger['epsilon']:g}"
    click.echo(f"spent {spent}, allowed {budget}, at delta {ledger['delta']:g}")


COMMANDS = (study_group, release_group, ledger_group)


def _connect(server: str, ca: Path | None, plain_http: bool) -> AdminClient:
    from sfumato.collector.client import AdminClient

    token = os.environ.get("SFUMATO_TOKEN", "")
    if not token:
        raise SpecError(
            "this command needs an administrator's token in SFUMATO_TOKEN; it is not set",
            hint="create one with sfumato token create, and export it as SFUMATO_TOKEN",
        )
    return AdminClient(server, token, ca=ca, plain_http=plain_http)


def _confirm(question: str, yes: bool) -> None:
    if not yes:
        click.confirm(question, abort=True, err=True)


def _reports(state: dict[str, Any]) -> str:
    """The number of reports of a study or a task, duplicates left out."""
    return f"{state['received'] - state['repeated']:,}"


def _cost(study: dict[str, Any]) -> str:
    """What a release costs, as the end of a sentence."""
    privacy = study["privacy"]
    if not TRUSTS[privacy["trust"]].is_charged or privacy["epsilon"] is None:
        return ""
    return f" and spends epsilon {privacy['epsilon']:g} of the budget"


def _print_study(study: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(study)
        return
    click.echo(f"{study['name']}: {study['state']}  ({study['id']})")
    if study["problem"]:
        click.echo(f"  {study['problem']}")
    if fault := study["fault"]:
        at = datetime.fromtimestamp(fault["next_try"], UTC).isoformat(timespec="seconds")
        tries = "once" if fault["tries"] == 1 else f"{fault['tries']} times"
        click.echo(f"  failing: {fault['problem']} (tried {tries}, next at {at})")
    rejected = ", ".join(f"{count:,} {why}" for why, count in study["rejected"].items())
    click.echo(
        f"  {study['received']:,} reports received, {study['counted']:,} counted, "
        f"{study['repeated']:,} duplicates; rejected: {rejected or 'none'}"
    )
    if study["terms"].get("passcode"):
        click.echo("  only devices that have its passcode take part")
    for task in study["tasks"]:
        total = "" if task["wanted"] is None else f" of {task['wanted']:,}"
        if not TRUSTS[study["privacy"]["trust"]].is_masked:
            click.echo(f"  {task['cohort']}: {task['state']}, {_reports(task)}{total} reports")
            continue
        line = f"  {task['cohort']}: {task['state']}"
        if task["waiting"] or task["state"] != "done":
            line += f", {task['waiting']:,}{total} devices waiting"
        for number, each in enumerate(task["rounds"], 1):
            line += f"; round {number}: {each['phase']}"
        click.echo(line)
    click.echo(f"  {study['plan']['algorithm']}")
    for line in study["privacy"]["statement"]:
        click.echo(f"  {line}")
