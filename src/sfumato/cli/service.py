"""Commands that run a collector and maintain its store, a thin layer over `sfumato.collector`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sfumato.cli.printing import FILE, json_option, print_json, print_result

if TYPE_CHECKING:  # the service is an extra, and slow to import
    from sfumato.collector.settings import Settings
    from sfumato.collector.store.store import Store, TokenRow

_Command = TypeVar("_Command", bound=Callable[..., Any])
_LEDGER_WARNING = (
    "this ledger lacks the studies that were opened and the tasks that were charged after the copy "
    "was made: count their releases as spent"
)


def _settings(command: _Command) -> _Command:
    """Add the options that a command needs to pass it the `settings` of a collector."""

    @click.option("--config", type=FILE, help="TOML file with settings.")
    @click.option("--store", help="Address of the store, in place of the settings'.")
    @wraps(command)
    def with_settings(config: Path | None, store: str | None, **options: Any) -> Any:
        return command(settings=_load(config, store=store), **options)

    return with_settings  # type: ignore[return-value]  # click adds the other arguments


@click.command("serve")
@_settings
@click.option("--listen", help="HOST:PORT to listen on, in place of the settings'.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), help="Port to listen on; 0 picks a free one."
)
@click.option(
    "--no-worker", is_flag=True, help="Only accept reports; `sfumato worker` does the rest."
)
@click.option("--no-dashboard", is_flag=True, help="Serve the API without the dashboard.")
@click.option(
    "--check", is_flag=True, help="Check everything that it needs, print the settings, and exit."
)
@json_option
def serve_command(
    settings: Settings,
    listen: str | None,
    port: int | None,
    no_worker: bool,
    no_dashboard: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Run a collector: accept reports from devices, and release results

    Prints the address that it listens on, which also serves the dashboard. Its log goes to stderr,
    one JSON object per line. SIGTERM and Ctrl-C stop it once the work in progress is done. Settings
    come from --config and SFUMATO_… variables; by default it listens on this machine only, and its
    store is in the current folder.

    --check creates nothing: it prints the settings in effect and the most memory that they allow,
    and checks the certificate and its end, the store, its disk, the lake, the limit of open files,
    the cache of compiled loops, the signing key, the clock, the budget and the tokens. The exit
    code is 0 if a collector can start; warnings go to stderr.

    \b
    Example:
      sfumato serve --config collector.toml --check
    """
    from sfumato.collector import serve
    from sfumato.dashboard import ROUTES

    settings = _with_address(settings, listen, port)
    if check:
        _check_settings(settings, as_json, with_worker=not no_worker)
        return

    def announce(address: str) -> None:
        print_result({"address": address}, f"listening on {address}", as_json)

    serve.serve(
        settings,
        announce=announce,
        with_worker=not no_worker,
        routes=() if no_dashboard else ROUTES,
    )


def _check_settings(settings: Settings, as_json: bool, *, with_worker: bool) -> None:
    from sfumato.collector import preflight
    from sfumato.collector.memory import memory_bound

    data, parts = settings.to_dict(), memory_bound(settings)
    findings = preflight.checks(settings)
    if as_json:
        memory = {"most_bytes": sum(parts.values()), "parts": parts}
        checks = [finding.to_dict() for finding in findings]
        print_json(data | {"worker": with_worker, "memory": memory, "checks": checks})
    else:
        for name, value in data.items():
            click.echo(f"{name} = {json.dumps(value)}")
        click.echo(
            "# worker: the store elects one of all processes with this store; this one may be "
            "elected"
            if with_worker
            else "# worker: not here (--no-worker); run `sfumato worker` for this store"
        )
        click.echo(f"# at most {_mebibytes(sum(parts.values()))} of memory:")
        for name, size in parts.items():
            click.echo(f"#   {name} {_mebibytes(size)}")
        click.echo("# checks:")
        for finding in findings:
            click.echo(f"#   {finding.state:<7}  {finding.check}: {finding.text}")
    for finding in findings:
        if finding.state == "warning":
            click.echo(f"warning: {finding.check}: {finding.text}; {finding.hint}", err=True)
    for finding in findings:
        if finding.problem is not None:
            raise finding.problem


def _mebibytes(size: int) -> str:
    return f"{math.ceil(size / (1 << 20)):,} MiB"


@click.command("worker")
@_settings
def worker_command(settings: Settings) -> None:
    """Run only a collector's worker: seal reports, release studies

    For a store that `sfumato serve --no-worker` writes reports to. If there are several workers,
    one is active, and the others wait until it stops.

    \b
    Example:
      sfumato worker --config collector.toml
    """
    from sfumato.collector import serve

    serve.work(settings)


@click.group("key")
def key_group() -> None:
    """Show or replace the key with which a collector signs its offers

    \b
    Example:
      sfumato key show --config collector.toml
    """


@key_group.command("show")
@_settings
@json_option
def key_show(settings: Settings, as_json: bool) -> None:
    """Print the public part of the signing key, which devices need

    \b
    Example:
      sfumato device offers --home phone --server … --key $(sfumato key show)
    """
    from sfumato.collector import keys
    from sfumato.device import offers

    public = offers.public_key(keys.read(Path(settings.signing_key))).hex()
    print_result({"public_key": public}, public, as_json)


@key_group.command("rotate")
@_settings
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def key_rotate(settings: Settings, yes: bool, as_json: bool) -> None:
    """Replace the signing key by a new one, and print its public part

    Stop the collector first. Devices accept offers signed with the key that they know, so each
    needs the new public key before it takes part again. The offers of open studies are signed anew;
    the old key stays in a file beside the new one.

    \b
    Example:
      sfumato key rotate --config collector.toml
    """
    from sfumato.collector import keys
    from sfumato.device import offers

    if not yes:
        click.confirm("Devices will refuse offers until they know the new key. Go on?", abort=True)
    with _open(settings) as store:
        public = offers.public_key(keys.rotate(settings.signing_key, store)).hex()
    print_result({"public_key": public}, public, as_json)


@click.group("token")
def token_group() -> None:
    """Create, list, rotate and revoke the tokens of administrators and analysts

    These commands open the store directly, so they need neither a token nor a running collector.

    \b
    Example:
      sfumato token create --role admin --name ops --days 90
    """


@token_group.command("create")
@_settings
@click.option(
    "--role",
    type=click.Choice(["admin", "analyst"]),
    required=True,
    help="What the token allows.",
)
@click.option("--name", required=True, help="Name of the owner.")
@click.option(
    "--days",
    type=click.IntRange(min=1),
    default=90,
    show_default=True,
    help="Days until it expires.",
)
@click.option(
    "--study",
    "studies",
    multiple=True,
    help="Name or id of a study that an analyst may see; repeat it. Default: all studies.",
)
@json_option
def token_create(
    settings: Settings, role: Any, name: str, days: int, studies: tuple[str, ...], as_json: bool
) -> None:
    """Create a token and print it; it cannot be shown again

    With --study, an analyst's token shows these studies only: for its owner there are no others.

    \b
    Example:
      export SFUMATO_TOKEN=$(sfumato token create --role admin --name ops)
      sfumato token create --role analyst --name Ann --study "Street trees"
    """
    from sfumato.collector import tokens

    with _open(settings) as store:
        row, token = tokens.create(store, role=role, name=name, days=days, studies=studies)
    _print_token(row, token, as_json)


@token_group.command("list")
@_settings
@json_option
def token_list(settings: Settings, as_json: bool) -> None:
    """List the tokens' ids, roles and owners, not the tokens themselves

    \b
    Example:
      sfumato token list
    """
    with _open(settings) as store, store.reading() as tx:
        rows, names = tx.tokens(), {row.id: row.name for row in tx.studies()}
    if as_json:
        print_json([_token(row) for row in rows])
        return
    for row in rows:
        line = f"{row.id}  {row.role:<7}  until {_day_of(row.expires)}  {row.name}"
        if row.studies is not None:
            line += f"  ({', '.join(names[study] for study in row.studies.split(','))})"
        click.echo(line)


@token_group.command("rotate")
@click.argument("token_id", metavar="ID")
@_settings
@click.option(
    "--days",
    type=click.IntRange(min=1),
    default=90,
    show_default=True,
    help="Days until the new one expires.",
)
@json_option
def token_rotate(settings: Settings, token_id: str, days: int, as_json: bool) -> None:
    """Replace a token by a new one of the same owner and role, and print it

    The old token is refused from now on, and whoever signed in with it is signed out.

    \b
    Example:
      export SFUMATO_TOKEN=$(sfumato token rotate 84da943120902d4a)
    """
    from sfumato.collector import tokens

    with _open(settings) as store:
        row, token = tokens.rotate(store, token_id, days=days)
    _print_token(row, token, as_json)


@token_group.command("revoke")
@click.argument("token_id", metavar="ID")
@_settings
@json_option
def token_revoke(settings: Settings, token_id: str, as_json: bool) -> None:
    """Revoke a token: it is refused from now on

    \b
    Example:
      sfumato token revoke 84da943120902d4a
    """
    from sfumato.collector import tokens

    with _open(settings) as store:
        tokens.revoke(store, token_id)
    print_result({"revoked": token_id}, f"revoked {token_id}", as_json)


@click.command("backup")
@click.argument("file", type=FILE)
@_settings
@json_option
def backup_command(settings: Settings, file: Path, as_json: bool) -> None:
    """Copy the store to a new file while the collector runs

    Keep the signing key with the copy, whose format is that of the store's database.

    \b
    Example:
      sfumato backup collector-monday.db --config collector.toml
    """
    from sfumato.collector.backup import backup

    backup(settings.store, file)
    print_result({"wrote": str(file)}, f"wrote {file}", as_json)


@click.command("restore")
@click.argument("file", type=FILE)
@_settings
@click.option(
    "--nothing-released",
    is_flag=True,
    help="Nothing was released after the copy was made: continue its studies.",
)
@json_option
def restore_command(settings: Settings, file: Path, nothing_released: bool, as_json: bool) -> None:
    """Fill an empty store from a copy that `sfumato backup` wrote

    Everything that the collector stored after the copy was made is lost: reports, releases and
    charges to the ledger. Running studies with trust central or secure are charged and ended, since
    they may have been released meanwhile; open new studies in their place. If the collector was
    stopped before the copy was made, use --nothing-released to continue them. The copy of an SQLite
    store can also be restored to PostgreSQL.

    \b
    Example:
      sfumato restore collector-monday.db --store sqlite:///collector.db
    """
    from sfumato.collector.backup import restore

    ended = restore(settings.store, file, nothing_released=nothing_released)
    lines = [f"restored {file}"]
    if ended:
        lines.append(
            "charged and ended, since they may have been released after the copy was made: "
            + ", ".join(ended)
        )
    warning = None if nothing_released else _LEDGER_WARNING
    if warning:
        lines.append(warning)
    data = {"restored": str(file), "ended": ended, "warning": warning}
    print_result(data, "\n".join(lines), as_json)


@click.command("export")
@click.argument("study", metavar="ID")
@click.option("--to", "address", required=True, metavar="ADDRESS", help="New folder, or its URL.")
@_settings
@json_option
def export_command(settings: Settings, study: str, address: str, as_json: bool) -> None:
    """Write the reports of a local study that has ended to Parquet files

    ID is the study's id or its name. The files have randomised records in random order and nothing
    else about devices; `sfumato fold` counts them. ADDRESS is a folder of this machine, or a URL
    such as s3://lake/trees; what is there is not overwritten. The copy is yours to delete: the
    collector deletes its own data only.

    \b
    Example:
      sfumato export "Street trees" --to s3://lake/street-trees --config collector.toml
    """
    from sfumato.collector.export import export

    with _open(settings) as store:
        reports = export(store, study, address)
    counts = reports.totals()
    print_result(
        {"wrote": address, **counts},
        f"wrote {counts['reports']:,} reports in {counts['partitions']:,} partitions to {address}",
        as_json,
    )


@click.command("check")
@_settings
@json_option
def check_command(settings: Settings, as_json: bool) -> None:
    """Look for damage in the store while the collector runs

    Reads everything that has a digest, compares the numbers of reports and the ledger with the
    studies, and lets SQLite check its file. Nothing is changed. Prints what is damaged, and exits
    with code 1 if anything is.

    \b
    Example:
      sfumato check --config collector.toml
    """
    from sfumato.collector import check

    findings = check.check(settings.store)
    print_result(asdict(findings), "\n".join(check.lines_of(findings)), as_json)
    if findings.problems:
        click.get_current_context().exit(1)


COMMANDS = (
    serve_command,
    worker_command,
    key_group,
    token_group,
    backup_command,
    restore_command,
    export_command,
    check_command,
)


def _load(config: Path | None, **options: Any) -> Settings:
    from sfumato.collector.settings import Settings

    overrides = {name: value for name, value in options.items() if value is not None}
    return replace(Settings.load(config), **overrides)


def _with_address(settings: Settings, listen: str | None, port: int | None) -> Settings:
    listen = listen or settings.listen
    if port is not None:
        listen = f"{listen.rpartition(':')[0]}:{port}"
    return replace(settings, listen=listen)


@contextmanager
def _open(settings: Settings) -> Iterator[Store]:
    from sfumato.collector.store.store import Store

    with closing(Store.open(settings.store)) as store:
        store.migrate()
        yield store


def _token(row: TokenRow) -> dict[str, Any]:
    return asdict(row) | {"studies": None if row.studies is None else row.studies.split(",")}


def _print_token(row: TokenRow, token: str, as_json: bool) -> None:
    if as_json:
        print_json({**_token(row), "token": token})
    else:
        click.echo(token)
        until = _day_of(row.expires)
        click.echo(f"token {row.id} of {row.name}, {row.role}, until {until}", err=True)


def _day_of(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
