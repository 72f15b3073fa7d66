"""Commands that ask a running collector: its studies, its releases, its ledger."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import date, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sfumato.cli.printing import print_json, print_release
from sfumato.errors import SpecError
from sfumato.study import TRUSTS

if TYPE_CHECKING:  # slow to import
    from sfumato.collector.client import AdminClient

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path)
_DAY_ZERO = date(1970, 1, 1)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
_yes = click.option("--yes", is_flag=True, help="Do not ask.")


def _client(command: _Command) -> _Command:
    """Options of commands that ask a running collector: `client` asks it."""

    @click.option(
        "--server",
        envvar="SFUMATO_SERVER",
        default="http://127.0.0.1:8420",
        show_default=True,
        help="Address of the collector.",
    )
    @click.option("--ca", type=_FILE, help="Certificates to trust besides the system's.")
    @click.option("--plain-http", is_flag=True, help="Send the token without TLS.")
    @wraps(command)
    def with_client(server: str, ca: Path | None, plain_http: bool, **options: Any) -> Any:
        return command(client=_connected(server, ca, plain_http), **options)

    return with_client  # type: ignore[return-value]  # click adds what is missing


@click.group("study")
def study_group() -> None:
    """Open, watch, close and delete the studies of a collector

    The collector's address is --server or SFUMATO_SERVER, the token SFUMATO_TOKEN.

    \b
    Example:
      sfumato study create study.toml --name "Street trees" --purpose "Which trees to plant next."
    """


@study_group.command("create")
@click.argument("study", type=_FILE)
@click.option("--name", required=True, help="What users are shown; consent goes by it.")
@click.option("--purpose", required=True, help="One sentence, shown to users.")
@click.option(
    "--daily-reports", type=click.IntRange(min=1), help="Of one device; default: the study's."
)
@click.option("--delay-seconds", type=click.IntRange(min=1), default=86_400, show_default=True)
@click.option("--lifetime-epsilon", type=float, help="What one device may spend in all.")
@click.option(
    "--closes", type=click.DateTime(["%Y-%m-%d"]), help="Last day on which reports count."
)
@_client
@_json
def study_create(
    client: AdminClient,
    study: Path,
    name: str,
    purpose: str,
    daily_reports: int | None,
    delay_seconds: int,
    lifetime_epsilon: float | None,
    closes: datetime | None,
    as_json: bool,
) -> None:
    """Open a study to devices

    STUDY is a TOML file; the dictionary that it names is read here and sent. The same command again
    opens nothing more.

    \b
    Example:
      sfumato study create study.toml --name "Street trees" --purpose "Which trees to plant next."
    """
    from sfumato.collector.client import study_keys

    made = client.create_study(
        {
            "name": name,
            "purpose": purpose,
            **study_keys(study),
            "daily_reports": daily_reports,
            "delay_seconds": delay_seconds,
            "lifetime_epsilon": lifetime_epsilon,
            "closes": None if closes is None else (closes.date() - _DAY_ZERO).days,
        }
    )
    _print_study(made, as_json)


@study_group.command("list")
@_client
@_json
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
        click.echo(f"{row['id']}  {row['state']:<10}  {row['name']}")


@study_group.command("show")
@click.argument("study", metavar="ID")
@_client
@_json
def study_show(client: AdminClient, study: str, as_json: bool) -> None:
    """Show a study: its state, its reports, its plan

    ID is the study's id or its name.

    \b
    Example:
      sfumato study show "Street trees"
    """
    _print_study(client.study(client.id_of(study)), as_json)


@study_group.command("close")
@click.argument("study", metavar="ID")
@_yes
@_client
@_json
def study_close(client: AdminClient, study: str, yes: bool, as_json: bool) -> None:
    """Stop collecting, and release what the reports say

    \b
    Example:
      sfumato study close "Street trees" --yes
    """
    known = client.study(client.id_of(study))
    cost = ""
    if TRUSTS[known["privacy"]["trust"]].is_charged and known["privacy"]["epsilon"] is not None:
        cost = f" and spends epsilon {known['privacy']['epsilon']:g} of the budget"
    _ask(f"this releases what {known['received']:,} reports say{cost}; close it?", yes)
    _print_study(client.close_study(known["id"]), as_json)


@study_group.command("delete")
@click.argument("study", metavar="ID")
@_yes
@_client
@_json
def study_delete(client: AdminClient, study: str, yes: bool, as_json: bool) -> None:
    """Drop all that devices sent for a study

    Its release, if there is one, and its entries in the ledger stay.

    \b
    Example:
      sfumato study delete "Street trees" --yes
    """
    known = client.study(client.id_of(study))
    _ask(f"this drops {known['received']:,} reports for good; delete them?", yes)
    _print_study(client.delete_study(known["id"]), as_json)


@click.group("release")
def release_group() -> None:
    """Read what a collector has released

    \b
    Example:
      sfumato release show "Street trees"
    """


@release_group.command("show")
@click.argument("study", metavar="ID")
@_client
@_json
def release_show(client: AdminClient, study: str, as_json: bool) -> None:
    """Show a study's release: estimates with intervals, largest first

    Ends with 75 while there is none yet.

    \b
    Example:
      sfumato release show "Street trees" --json
    """
    from sfumato.questions.registry import read_release

    data = client.release(client.id_of(study))
    if as_json:
        print_json(data)
    else:
        print_release(read_release(data))


@release_group.command("export")
@click.argument("study", metavar="ID")
@click.option(
    "--to", "file", type=_FILE, required=True, help="FILE.json, .csv, .parquet, .png or .pt."
)
@_client
@_json
def release_export(client: AdminClient, study: str, file: Path, as_json: bool) -> None:
    """Write a study's release to a file

    JSON holds everything; CSV the estimates; Parquet the estimates, with the rest in its metadata;
    PNG a plot of the largest. Of a model, JSON holds what there is to say about it, and .pt its
    parameters, as PyTorch's load_state_dict takes them.

    \b
    Example:
      sfumato release export "Street trees" --to trees.parquet
    """
    from sfumato.flow.release import MODEL_ENDING, EstimateRelease
    from sfumato.questions.registry import read_release

    ending, endings = file.suffix.removeprefix("."), (*EstimateRelease.endings, MODEL_ENDING)
    if ending not in endings:
        raise SpecError(f"{file} must end in .{', .'.join(endings)}")
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
    if as_json:
        print_json({"wrote": str(file), "estimates": len(data.get("estimates", ()))})
    else:
        click.echo(f"wrote {file}")


@click.group("ledger")
def ledger_group() -> None:
    """Read what a collector has spent of its devices' privacy

    \b
    Example:
      sfumato ledger show
    """


@ledger_group.command("show")
@_client
@_json
def ledger_show(client: AdminClient, as_json: bool) -> None:
    """Show the charges, and what of the budget is spent

    \b
    Example:
      sfumato ledger show --json
    """
    ledger = client.ledger()
    if as_json:
        print_json(ledger)
        return
    for entry in ledger["entries"]:
        click.echo(f"{entry['campaign'][:12]}  {entry['cohort']:<12}  {entry['loss']['kind']}")
    spent = "without bound" if ledger["spent"] is None else f"epsilon {ledger['spent']:.4g}"
    allowed = "no limit" if ledger["epsilon"] is None else f"epsilon {ledger['epsilon']:g}"
    click.echo(f"spent {spent}, allowed {allowed}, at delta {ledger['delta']:g}")


COMMANDS = (study_group, release_group, ledger_group)


def _connected(server: str, ca: Path | None, plain_http: bool) -> AdminClient:
    from sfumato.collector.client import AdminClient

    token = os.environ.get("SFUMATO_TOKEN", "")
    if not token:
        raise SpecError(
            "a collector is administered with a token, and there is none",
            hint="set SFUMATO_TOKEN to what sfumato token create printed",
        )
    return AdminClient(server, token, ca=ca, plain_http=plain_http)


def _ask(question: str, yes: bool) -> None:
    if not yes and not click.confirm(question, err=True):
        raise click.Abort


def _print_study(study: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(study)
        return
    click.echo(f"{study['name']}: {study['state']}  ({study['id']})")
    if study["problem"]:
        click.echo(f"  {study['problem']}")
    rejected = ", ".join(f"{count:,} {why}" for why, count in study["rejected"].items())
    click.echo(
        f"  {study['received']:,} reports came, {study['counted']:,} count, "
        f"{study['repeated']:,} came again; rejected: {rejected or 'none'}"
    )
    for task in study["tasks"]:
        wanted = "" if task["wanted"] is None else f" of {task['wanted']:,}"
        if not TRUSTS[study["privacy"]["trust"]].is_masked:
            click.echo(f"  {task['cohort']}: {task['state']}, {task['received']:,}{wanted} reports")
            continue
        line = f"  {task['cohort']}: {task['state']}, {task['waiting']:,}{wanted} devices wait"
        for number, each in enumerate(task["rounds"], 1):
            line += f"; round {number}: {each['phase']}"
        click.echo(line)
    click.echo(f"  {study['plan']['algorithm']}")
    for line in study["privacy"]["statement"]:
        click.echo(f"  {line}")
