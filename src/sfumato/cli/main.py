"""The command line `sfumato`, a thin layer over the library's functions.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 misused (a bad
option, study or file), 75 not ready yet.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from sfumato import __version__
from sfumato.cli import admin as admin_cli
from sfumato.cli import device as device_cli
from sfumato.cli import fleet as fleet_cli
from sfumato.cli import service as service_cli
from sfumato.cli.printing import (
    FILE,
    NEW_FILE,
    PICTURE,
    json_option,
    print_bill,
    print_estimates,
    print_json,
    print_release,
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

if TYPE_CHECKING:  # so that commands start quickly
    from sfumato.engines import Engine

_USER_ERRORS = (SpecError, DataError)
_NOT_READY = 75  # EX_TEMPFAIL in sysexits.h
EXTRAS = {  # the extra that brings a package
    "distributed": "cluster",
    "fastapi": "server",
    "h11": "server",
    "jinja2": "server",
    "matplotlib": "plot",
    "prometheus_client": "server",
    "psycopg": "postgres",
    "python_multipart": "server",
    "starlette": "server",
    "torch": "learn",
    "uvicorn": "server",
}


class _Commands(click.Group):
    """Prints our errors as one line and a hint, with an exit code; others are bugs and show."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SfumatoError as problem:
            _fail(problem)
        except ModuleNotFoundError as problem:
            if (extra := EXTRAS.get(problem.name or "")) is None:
                raise
            message = f"this command needs the package {problem.name}, which is not installed"
            _fail(SpecError(message, hint=f'pip install "sfumato[{extra}]"'))
        except BrokenPipeError:  # the reader of our output is gone, which is not an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)


def _fail(problem: SfumatoError) -> NoReturn:
    text = " ".join(str(problem).splitlines())
    click.echo(f"error: {text}", err=True)
    if problem.hint:
        click.echo(f"hint: {problem.hint}", err=True)
    if isinstance(problem, NotReadyError):
        sys.exit(_NOT_READY)
    sys.exit(2 if isinstance(problem, _USER_ERRORS) else 1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sfumato")
def main() -> None:
    """Private federated analytics: estimates with intervals, and their privacy cost

    \b
    Example:
      sfumato plan study.toml
      sfumato simulate study.toml --data words.csv
    """


def _engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options that name an engine; the command gets it open, as `engine`."""

    @click.option(
        "--engine",
        type=click.Choice(["local", "dask"]),
        default="local",
        show_default=True,
        help="Where to work: in threads of this process, or on a Dask cluster.",
    )
    @click.option("--scheduler", help="Address of a Dask scheduler. Default: start workers here.")
    @click.option(
        "--workers", type=click.IntRange(min=1), help="Threads, or processes of Dask, here."
    )
    @wraps(command)
    def with_engine(engine: str, scheduler: str | None, workers: int | None, **rest: Any) -> None:
        from sfumato.engines import DaskEngine, LocalEngine

        if engine == "local" and scheduler is not None:
            raise SpecError("--scheduler is for --engine dask")
        if engine == "local":
            command(engine=None if workers is None else LocalEngine(workers), **rest)
            return
        with DaskEngine(scheduler, workers=workers) as cluster:
            command(engine=cluster, **rest)

    return with_engine


@main.command("plan")
@click.argument("study", type=FILE)
@json_option
@click.option("--compare", "as_table", is_flag=True, help="Print all algorithms side by side.")
@click.option("--plot", type=PICTURE, help="Draw the trade-off (PNG, SVG, PDF).")
def plan_command(study: Path, as_json: bool, as_table: bool, plot: Path | None) -> None:
    """Size a study and predict its error, its traffic and its privacy

    STUDY is a TOML file. An impossible study is refused (exit code 1), with advice on how to make
    it possible. --compare prints every algorithm that could answer it, marks the one that the plan
    uses and says why; with it, --plot draws their errors against the bytes that a device sends.
    Alone, --plot is for trust = "local": it draws the error of every oracle against the size of its
    table.

    \b
    Example:
      sfumato plan study.toml --compare
    """
    from sfumato.planning import Comparison, compare, plan

    result = compare(study) if as_table else plan(study)
    if plot is not None:
        figure = result.plot() if isinstance(result, Comparison) else result.draw()
        figure.savefig(plot, dpi=150)
        click.echo(f"wrote {plot}", err=True)
    if as_json:
        print_json(result.to_dict())
    else:
        click.echo(repr(result))


@main.command("simulate")
@click.argument("study", type=FILE)
@click.option(
    "--data",
    required=True,
    metavar="ADDRESS",
    help="CSV, CSV.gz, Parquet or NumPy file; a folder or pattern of files; or a URL.",
)
@click.option("--item-column", help='Column of items. Default: "item", or the first column.')
@click.option("--device-column", help="Column that names the device of each row.")
@click.option("--count-column", help="Column that says how many times each row counts.")
@click.option("--segment-column", help='Column of segments. Default: "segment", if there are any.')
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Number of rounds, in place of the study's."
)
@click.option("--seed", type=click.IntRange(min=0), help="Repeat a run exactly, noise included.")
@click.option("--ledger", type=FILE, help="Ledger file to charge; created if missing.")
@click.option("--protocol", is_flag=True, help="Run every device by itself, message by message.")
@_engine_options
@click.option("--plot", type=PICTURE, help="Write a picture of the answer (PNG, SVG, PDF).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def simulate_command(
    study: Path,
    data: str,
    item_column: str | None,
    device_column: str | None,
    count_column: str | None,
    segment_column: str | None,
    rounds: int | None,
    seed: int | None,
    ledger: Path | None,
    protocol: bool,
    engine: Engine | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run a study on simulated devices

    Each row of the data is one device's item, unless a device column groups rows. Estimates are
    printed with 95% intervals, largest first. For a mean, each row is one device's vector (.npy,
    .npz, or columns of numbers).

    \b
    Example:
      sfumato simulate study.toml --data words.csv --item-column word --seed 1 --json
    """
    from sfumato.privacy import Budget, Ledger
    from sfumato.simulation.simulate import simulate
    from sfumato.study import Study

    question = Study.load(study)
    if rounds is not None:
        question = replace(question, rounds=rounds)
    account = None
    if ledger is not None:
        epsilon = question.epsilon
        if epsilon is not None and question.is_local:  # epsilon is that of one report
            epsilon *= question.daily_reports or 1
        account = Ledger(Budget(epsilon=epsilon, delta=question.delta), ledger)
        click.get_current_context().call_on_close(account.close)
    with progress_bar() as progress, warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always", SimulationWarning)
        release: Any = simulate(
            question,
            data,
            item_column=item_column,
            device_column=device_column,
            count_column=count_column,
            segment_column=segment_column,
            seed=seed,
            ledger=account,
            engine=engine,
            protocol=protocol,
            progress=progress,
        )
    for warning in messages:
        click.echo(f"warning: {warning.message}", err=True)
    print_release(release, as_json)
    if plot is not None:
        release.plot(path=plot)
        click.echo(f"wrote {plot}", err=True)


@main.command("fold")
@click.argument("address")
@_engine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def fold_command(address: str, engine: Engine | None, as_json: bool) -> None:
    """Count the exported reports of a study, and print its release

    ADDRESS is a folder that `sfumato export` wrote, or the URL of one. The tally is the same as the
    collector's, and so are the release and its privacy statement. A partition that is missing, cut
    or not of this study is refused by its name, and then nothing is counted.

    \b
    Example:
      sfumato fold s3://lake/street-trees --engine dask --scheduler tcp://10.0.0.5:8786
    """
    from sfumato import lake

    with progress_bar() as progress:
        release = lake.fold(address, engine=engine, progress=progress)
    print_release(release, as_json)


@main.command("train")
@click.argument("study", type=FILE)
@click.option("--data", required=True, type=FILE, help="The clients' examples.")
@click.option(
    "--kind",
    type=click.Choice(["examples", "femnist", "mnist", "shakespeare", "commits"]),
    default="examples",
    show_default=True,
    help="Kind of data: an .npz file of inputs, targets and client, or a known data set.",
)
@click.option("--public-test", is_flag=True, help="The test examples come from no client.")
@click.option(
    "--checkpoint", type=NEW_FILE, help="Write this file after every round; needs --ledger."
)
@click.option("--resume", is_flag=True, help="Continue from the checkpoint, with the same ledger.")
@click.option("--metrics", type=NEW_FILE, help="Append one line of JSON per round to this file.")
@click.option("--tensorboard", type=FILE, help="Write the metrics to this TensorBoard folder.")
@click.option(
    "--model",
    "model_file",
    type=NEW_FILE,
    help="Write the parameters to this file, or to FILE.onnx the model.",
)
@click.option(
    "--device", default="cpu", show_default=True, help="PyTorch device: cpu, cuda, cuda:1."
)
@click.option(
    "--float-noise", is_flag=True, help="Floating-point sums and noise, for experiments only."
)
@click.option(
    "--evaluate-every",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Rounds between two evaluations.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Repeat a run exactly, noise included.")
@click.option("--ledger", type=FILE, help="Ledger file to charge; created if missing.")
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

    With --ledger, every round is charged before it runs. With --resume, an interrupted training
    continues from its checkpoint; it needs the ledger that it started with. A round that runs again
    is charged again, and training ends early if the ledger refuses a round.

    Accuracy and loss are exact. Unless --public-test says that no client has any of the test
    examples, the release states that its guarantee does not cover accuracy and loss.

    \b
    Example:
      sfumato train study.toml --data clients.npz --model model.pt
      sfumato train study.toml --data clients.npz --checkpoint run.pt --ledger ledger.db --resume
    """
    from sfumato.learn import data as loaders
    from sfumato.privacy import Budget, Ledger
    from sfumato.simulation.train import check_model_file, train
    from sfumato.study import Study

    if model_file is not None:
        check_model_file(model_file)
    question = Study.load(study)
    account = None
    if ledger is not None:
        account = Ledger(Budget(epsilon=question.epsilon, delta=question.delta), ledger)
        click.get_current_context().call_on_close(account.close)
    with progress_bar() as progress:
        progress("reading", 0.0)
        clients = loaders.read(kind, data)
        if public_test:
            clients = replace(clients, public_test=True)
        release = train(
            question,
            clients,
            device=device,
            exact=not float_noise,
            seed=seed,
            ledger=account,
            checkpoint=checkpoint,
            resume=resume,
            metrics=metrics,
            tensorboard=tensorboard,
            evaluate_every=evaluate_every,
            progress=progress,
        )
    if model_file is not None:
        release.save(model_file)
        click.echo(f"wrote {model_file}", err=True)
    if as_json:
        print_json(release.to_dict())
        return
    click.echo(repr(release))
    for entry in release.history:
        figures = f"accuracy {entry.accuracy:.4f}  " if entry.accuracy is not None else ""
        line = f"  round {entry.round:>6,}  {figures}rate {entry.rate:.3g}"
        click.echo(line)
    print_bill(release)


@main.command("reproduce")
@click.argument("name")
@click.option(
    "--scale",
    type=click.Choice(["small", "paper"]),
    default="small",
    show_default=True,
    help="Size of the experiment: a small one, or the paper's.",
)
@_engine_options
@click.option("--json", "as_json", is_flag=True, help="Print the numbers and claims as JSON lines.")
@click.option("--out", type=FILE, help="Folder for the figure and the numbers. Default: out/NAME.")
def reproduce_command(
    name: str, scale: Any, engine: Engine | None, as_json: bool, out: Path | None
) -> None:
    """Reproduce a figure of a paper, and check which of its claims hold

    NAME is one of those that `sfumato reproduce list` prints. Writes NAME.png, NAME.svg and
    NAME.jsonl.

    \b
    Example:
      sfumato reproduce 000-fig3 --scale paper --out figures
    """
    from sfumato.reproduce import figures

    experiments = figures()
    if name == "list":
        if as_json:
            for figure in experiments.values():
                print_json({"name": figure.name, "title": figure.title})
        else:
            for figure in experiments.values():
                click.echo(f"{figure.name:<12} {figure.title}")
        return
    if name not in experiments:
        raise SpecError(f"there is no figure {name!r}", hint="sfumato reproduce list prints all")
    folder = out or Path("out") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise SpecError(f"the folder {folder} cannot be made: {problem.strerror}") from problem
    with progress_bar() as progress:
        outcome = experiments[name].run(scale, progress, engine)
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
@click.option(
    "--devices",
    type=click.IntRange(min=200),
    default=2_000,
    show_default=True,
    help="Number of simulated devices.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Seed of the devices' data.",
)
@click.option("--keep", is_flag=True, help="Keep the collector and its dashboard running.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def demo_command(devices: int, seed: int, keep: bool, as_json: bool) -> None:
    """Run three studies on this machine, and compare with the truth

    Starts a collector and a fleet of devices that talk to it over HTTP. The studies run at once:
    emoji and new words with local privacy, and app crashes, where the collector sees only masked
    sums; a quarter of the devices answer the latter. The devices are simulated, all else is real;
    nothing leaves this machine.

    \b
    Example:
      sfumato demo --keep
    """
    import tempfile

    click.echo("starting a collector …", err=True)
    from sfumato.cli import demo

    with (
        tempfile.TemporaryDirectory(prefix="sfumato-demo-") as folder,
        demo.collector(Path(folder)) as running,
    ):
        click.echo(f"dashboard  {running.dashboard}\ntoken      {running.token}\n", err=True)
        questions = demo.questions(devices, seed)
        with progress_bars([question.name for question in questions]) as report:
            answers = running.run(questions, report)
        if as_json:
            print_json([answer.to_dict() for answer in answers])
        for answer in [] if as_json else answers:
            click.echo(f"{answer.question.name}: {answer.question.purpose}\n")
            print_estimates(answer.release, truth=dict(answer.question.truth), top=8)
            click.echo()
        if keep:
            click.echo("the dashboard runs until Ctrl-C", err=True)
            with suppress(KeyboardInterrupt):
                threading.Event().wait()


for _command in (
    *service_cli.COMMANDS,
    *admin_cli.COMMANDS,
    device_cli.device_group,
    fleet_cli.fleet_command,
):
    main.add_command(_command)
