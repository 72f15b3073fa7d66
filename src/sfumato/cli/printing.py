"""Printing for commands: progress on stderr, releases as a table or JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click


class _NewFile(click.Path):
    """A file to write. Its folder must exist, which is checked before there is a result to lose."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        folder = Path(value).parent
        if not folder.is_dir():
            self.fail(f"there is no folder {folder}", param, ctx)
        return super().convert(value, param, ctx)


class _Picture(_NewFile):
    """A picture to write, of a kind that can be drawn."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from sfumato.flow import pictures

        path = super().convert(value, param, ctx)
        pictures.check_file(path)
        return path


FILE = click.Path(path_type=Path)
NEW_FILE = _NewFile(path_type=Path, dir_okay=False, writable=True)
PICTURE = _Picture(path_type=Path, dir_okay=False, writable=True)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr if it is a terminal, otherwise one line per stage."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        last = ""

        def print_stage(stage: str, share: float) -> None:
            nonlocal last
            if stage != last:
                click.echo(f"{stage} …", err=True)
                last = stage

        yield print_stage
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        job = bar.add_task("starting", total=1.0)
        yield lambda stage, share: bar.update(job, description=stage, completed=share)


@contextmanager
def progress_bars(names: Sequence[str]) -> Iterator[Callable[[str, str, float], None]]:
    """One progress bar per name on stderr if it is a terminal, otherwise one line per stage."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    last: dict[str, str] = {}

    def print_stage(name: str, stage: str, share: float) -> None:
        if last.get(name) != stage:
            click.echo(f"{name}: {stage} …", err=True)
            last[name] = stage

    if not console.is_terminal:
        yield print_stage
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        jobs = {name: bar.add_task(name, total=1.0) for name in names}

        def update(name: str, stage: str, share: float) -> None:
            bar.update(jobs[name], description=f"{name}: {stage}", completed=share)

        yield update


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, ensure_ascii=False, allow_nan=False))


def print_result(data: Any, text: str, as_json: bool) -> None:
    """Print a result for programs or for people."""
    if as_json:
        print_json(data)
    else:
        click.echo(text)


def print_release(release: Any, as_json: bool) -> None:
    """Print a release: for people a table of its largest counts, or its repr; then its bill."""
    from sfumato.flow.release import CountRelease

    if as_json:
        _print_release_json(release)
    elif isinstance(release, CountRelease):
        print_estimates(release, truth=None)
    else:
        click.echo(repr(release))
        print_bill(release)


def _print_release_json(release: Any) -> None:
    """Print a release as one JSON object, in pieces, since it may have millions of items."""
    from sfumato.flow.release import EstimateRelease

    if not isinstance(release, EstimateRelease):
        print_json(release.to_dict())
        return
    head = json.dumps(release.head(), ensure_ascii=False, allow_nan=False)
    write = sys.stdout.write
    write(head[:-1] + ', "estimates": [')
    first = True
    for batch in release.frame().to_batches(max_chunksize=65_536):
        rows = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in batch.to_pylist()]
        write(("" if first else ",\n") + ",\n".join(rows))
        first = False
    write("]}\n")


def print_estimates(release: Any, truth: dict[str, int] | None, top: int = 20) -> None:
    """Print the largest counts; the answers of segments side by side, as far as there is room."""
    from rich.columns import Columns
    from rich.console import Console

    answers = release.by_segment()
    tables = [_table(answer, truth, top, name) for name, answer in answers.items()]
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(Columns(tables, padding=(1, 4)) if len(tables) > 1 else tables[0])
    more = sum(max(0, len(answer) - top) for answer in answers.values())
    if more:
        click.echo(f"… and {more:,} more; --json prints all")
    print_bill(release)


def _table(release: Any, truth: dict[str, int] | None, top: int, title: str) -> Any:
    from rich.table import Table

    table = Table(
        box=None, header_style="bold", pad_edge=False, title=title or None, title_justify="left"
    )
    table.add_column("item", overflow="fold", max_width=40)
    for name in ("count", "95% interval", *(["truth", ""] if truth is not None else [])):
        table.add_column(name, justify="right")
    for row in release.frame().slice(0, top).to_pylist():
        line = [
            str(row["item"]),
            f"{row['count']:z,.1f}",
            f"{row['low']:z,.1f} … {row['high']:z,.1f}",
        ]
        if truth is not None:
            true = truth.get(row["item"], 0)
            line += [f"{true:,}", "" if row["low"] <= true <= row["high"] else "outside"]
        table.add_row(*line)
    return table


def print_bill(release: Any) -> None:
    cost = release.cost
    click.echo(
        f"\n{cost.devices:,} devices, {cost.rounds} round{'s' if cost.rounds > 1 else ''}, "
        f"{cost.bytes_per_device:,} bytes per device, {cost.seconds:.1f} s"
    )
    click.echo(release.privacy.statement)
    for note in release.notes:
        click.echo(f"note: {note}", err=True)
