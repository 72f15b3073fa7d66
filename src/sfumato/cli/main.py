"""`sfumato …`: the command line, over the same functions as the library.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 misused (a bad
option, study or file), 75 not ready yet.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from sfumato import __version__
from sfumato.cli import admin as admin_cli
from sfumato.cli import device as device_cli
from sfumato.cli import fleet as fleet_cli
from sfumato.cli import service as service_cli
from sfumato.cli.printing import (
    print_bill,
    print_estimates,
    print_json,
    print_release,
    print_release_json,
    progress_bar,
    progress_bars,
)
from sfumato.errors import (
    DataError,
    NotReadyError,
    SfumatoError,
    SimulationWarning,
    SpecError,
)

_MISUSED = (SpecError, DataError)
_NOT_READY = 75  # what sysexits.h calls a temporary failure
_STUDY = click.Path(path_type=Path)


class _Commands(click.Group):
    """Turns our errors into one line, a hint and an exit code; anything else is a bug and shows."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SfumatoError as problem:
            _fail(problem)
        except BrokenPipeError:  # the reader of our output went away: nothing is wrong
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)


def _fail(problem: SfumatoError) -> NoReturn:
    text = " ".join(str(problem).splitlines())
    click.echo(f"error: {text}", err=True)
    if problem.hint:
        click.echo(f"hint: {problem.hint}", err=True)
    if isinstance(problem, NotReadyError):
        sys.exit(_NOT_READY)
    sys.exit(2 if isinstance(problem, _MISUSED) else 1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sfumato")
def main() -> None:
    """Private federated analytics: ask a fleet, get an answer with error bars and a bill

    \b
    Example:
      sfumato plan study.toml
      sfumato simulate study.toml --data words.csv
    """


@main.command("plan")
@click.argument("study", type=_STUDY)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--plot", type=_STUDY, help="Draw the trade-off of a local study (PNG, SVG, PDF).")
def plan_command(study: Path, as_json: bool, plot: Path | None) -> None:
    """Size a study and predict its error, its bytes and its privacy

    STUDY is a TOML file. A study that cannot be met is refused (exit code 1), with what would make
    it possible. --plot draws error against the size of the table, for every oracle that trust =
    "local" can take, and marks the one taken.

    \b
    Example:
      sfumato plan study.toml --json
    """
    from sfumato.planning import plan

    planned = plan(study)
    if plot is not None:
        planned.design.draw(planned.study).savefig(plot, dpi=150)
        click.echo(f"wrote {plot}", err=True)
    if as_json:
        print_json(planned.to_dict())
    else:
        click.echo(repr(planned))


@main.command("simulate")
@click.argument("study", type=_STUDY)
@click.option("--data", required=True, type=_STUDY, help="CSV, CSV.gz, Parquet or numpy file.")
@click.option("--item-column", help='Column of items. Default: "item", or the first column.')
@click.option("--device-column", help="Column that names the device of each row.")
@click.option("--count-column", help="Column that says how many times each row counts.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds, instead of the study's.")
@click.option("--seed", type=click.IntRange(min=0), help="Repeat a run exactly, noise included.")
@click.option("--ledger", type=_STUDY, help="Charge this ledger file; made if it is not there.")
@click.option(
    "--protocol", is_flag=True, help="Let every device answer by itself, message by message."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def simulate_command(
    study: Path,
    data: Path,
    item_column: str | None,
    device_column: str | None,
    count_column: str | None,
    rounds: int | None,
    seed: int | None,
    ledger: Path | None,
    protocol: bool,
    as_json: bool,
) -> None:
    """Ask a study's question of simulated devices

    A row of the data is one device's item, unless a device column groups rows. Estimates come
    largest first with 95% intervals. For a mean a row is one device's vector (.npy, .npz, or
    columns of numbers).

    \b
    Example:
      sfumato simulate study.toml --data words.csv --item-column word --seed 1 --json
    """
    from sfumato.privacy import Budget, Ledger
    from sfumato.simulation import vectors
    from sfumato.simulation.simulate import simulate
    from sfumato.study import Study

    question = Study.load(study)
    if rounds is not None:
        question = replace(question, rounds=rounds)
    books = None
    if ledger is not None:
        allowed = question.epsilon
        if allowed is not None and question.is_local:  # epsilon is that of one report
            allowed *= question.daily_reports or 1
        books = Ledger(Budget(epsilon=allowed, delta=question.delta), ledger)
    with progress_bar() as progress, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SimulationWarning)
        release: Any = simulate(
            question,
            vectors.load(data) if question.facts.data == "vectors" else data,
            item_column=item_column,
            device_column=device_column,
            count_column=count_column,
            seed=seed,
            ledger=books,
            protocol=protocol,
            progress=progress,
        )
    for warning in caught:
        click.echo(f"warning: {warning.message}", err=True)
    if as_json:
        print_release_json(release)
    else:
        print_release(release)


@main.command("train")
@click.argument("study", type=_STUDY)
@click.option("--data", required=True, type=_STUDY, help="The clients' examples.")
@click.option(
    "--kind",
    type=click.Choice(["examples", "femnist", "mnist", "shakespeare", "commits"]),
    default="examples",
    show_default=True,
    help="What the data is: an .npz of inputs, targets and client, or a known data set.",
)
@click.option("--public-test", is_flag=True, help="No client's data are among the test examples.")
@click.option("--checkpoint", type=_STUDY, help="Written after every round; needs --ledger.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint, with the same ledger.")
@click.option("--metrics", type=_STUDY, help="Append a line of JSON per round to this file.")
@click.option("--tensorboard", type=_STUDY, help="Write the same for TensorBoard, to this folder.")
@click.option("--model", "model_file", type=_STUDY, help="Write the parameters to this file.")
@click.option("--device", default="cpu", show_default=True, help="Of PyTorch: cpu, cuda, cuda:1.")
@click.option("--float-noise", is_flag=True, help="Floating-point sums and noise: experiments.")
@click.option("--evaluate-every", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), help="Repeat a run exactly, noise included.")
@click.option("--ledger", type=_STUDY, help="Charge this ledger file; made if it is not there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def train_command(
    study: Path,
    data: Path,
    kind: str,
    public_test: bool,
    checkpoint: Path | None,
    resume: bool,
    metrics: Path | None,
    tensorboard: Path | None,
    model_file: Path | None,
    device: str,
    float_noise: bool,
    evaluate_every: int,
    seed: int | None,
    ledger: Path | None,
    as_json: bool,
) -> None:
    """Train a study's model on simulated clients

    With --ledger every round is charged before it is run. A training that was interrupted goes on
    from its checkpoint with --resume, and needs the ledger that it started with: a round that is
    run again is charged again, and training ends early where the ledger refuses one.

    Accuracy and loss are exact. Unless --public-test says that no client holds any of the test
    examples, the release says that they are not covered by its guarantee.

    \b
    Example:
      sfumato train study.toml --data clients.npz --model model.pt
      sfumato train study.toml --data clients.npz --checkpoint run.pt --ledger ledger.db --resume
    """
    from sfumato.learn import data as loaders
    from sfumato.privacy import Budget, Ledger
    from sfumato.simulation.train import train
    from sfumato.study import Study

    question = Study.load(study)
    books = None
    if ledger is not None:
        books = Ledger(Budget(epsilon=question.epsilon, delta=question.delta), ledger)
    with progress_bar() as progress:
        progress("reading", 0.0)
        clients = loaders.read(kind, data)
        if public_test:
            clients = replace(clients, public_test=True)
        trained = train(
            question,
            clients,
            device=device,
            exact=not float_noise,
            seed=seed,
            ledger=books,
            checkpoint=checkpoint,
            resume=resume,
            metrics=metrics,
            tensorboard=tensorboard,
            evaluate_every=evaluate_every,
            progress=progress,
        )
    if model_file is not None:
        trained.save(model_file)
        click.echo(f"wrote {model_file}", err=True)
    if as_json:
        print_json(trained.to_dict())
        return
    click.echo(repr(trained))
    for seen in trained.history:
        click.echo(f"  round {seen.round:>6,}  accuracy {seen.accuracy:.4f}  rate {seen.rate:.3g}")
    print_bill(trained)


@main.command("reproduce")
@click.argument("name")
@click.option("--scale", type=click.Choice(["small", "paper"]), default="small", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers and claims as JSON lines.")
@click.option(
    "--out", type=_STUDY, help="Folder for the figure and the numbers. Default: out/NAME."
)
def reproduce_command(name: str, scale: Any, as_json: bool, out: Path | None) -> None:
    """Make a figure of a paper again, and say which of its claims hold

    NAME is one of `sfumato reproduce list`. Writes NAME.png, NAME.svg and NAME.jsonl.

    \b
    Example:
      sfumato reproduce 000-fig3 --scale paper --out figures
    """
    from sfumato.reproduce import figures

    known = figures()
    if name == "list":
        if as_json:
            for figure in known.values():
                print_json({"name": figure.name, "title": figure.title})
        else:
            for figure in known.values():
                click.echo(f"{figure.name:<12} {figure.title}")
        return
    if name not in known:
        raise SpecError(
            f"there is no figure {name!r}", hint="sfumato reproduce list names those there are"
        )
    with progress_bar() as progress:
        outcome = known[name].run(scale, progress)
    folder = out or Path("out") / name
    folder.mkdir(parents=True, exist_ok=True)
    lines = [dict(line) for line in outcome.numbers]
    claims = [
        {"claim": claim.text, "holds": claim.holds, "detail": claim.detail}
        for claim in outcome.claims
    ]
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*lines, *claims])
    picture = outcome.draw()
    for ending in ("png", "svg"):
        picture.savefig(folder / f"{name}.{ending}", dpi=150)
    if as_json:
        for line in [*lines, *claims]:
            print_json(line)
    else:
        for claim in outcome.claims:
            verdict = "holds" if claim.holds else "does not hold here"
            click.echo(f"{verdict:<20} {claim.text}\n{'':<20} {claim.detail}")
    click.echo(f"wrote {folder}/{name}.png, .svg and .jsonl", err=True)


@main.command("demo")
@click.option("--devices", type=click.IntRange(min=200), default=2_000, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=1, help="Of what devices hold.")
@click.option("--keep", is_flag=True, help="Leave the collector and its dashboard running.")
def demo_command(devices: int, seed: int, keep: bool) -> None:
    """Run a collector and a fleet over HTTP, ask three questions, compare with the truth

    Three studies at once: emoji and new words, of which no device tells the truth, and app crashes,
    of which the collector sees masked sums alone. Devices are made up, all else is real; nothing
    leaves this machine.

    \b
    Example:
      sfumato demo --keep
    """
    import tempfile

    from sfumato.cli import demo

    with (
        tempfile.TemporaryDirectory(prefix="sfumato-demo-") as folder,
        demo.collector(Path(folder)) as running,
    ):
        click.echo(f"dashboard  {running.dashboard}\ntoken      {running.token}\n", err=True)
        asked = demo.questions(devices, seed)
        with progress_bars([question.name for question in asked]) as tell:
            answers = running.run(asked, tell)
        for answer in answers:
            click.echo(f"{answer.question.name}: {answer.question.purpose}\n")
            print_estimates(answer.release, truth=dict(answer.question.truth), top=8)
            click.echo()
        if keep:
            click.echo("the dashboard stays open until Ctrl-C", err=True)
            with suppress(KeyboardInterrupt):
                threading.Event().wait()


for _command in (
    *service_cli.COMMANDS,
    *admin_cli.COMMANDS,
    device_cli.device_group,
    fleet_cli.fleet_command,
):
    main.add_command(_command)
