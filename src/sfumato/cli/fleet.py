"""The command for a fleet of simulated devices, a thin layer over `network_fleet`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from sfumato.cli import passcodes
from sfumato.cli.device import public_key
from sfumato.cli.printing import FILE, json_option, print_json, progress_bar
from sfumato.errors import ServiceError, SpecError


@click.command("fleet")
@click.option("--server", required=True, envvar="SFUMATO_SERVER", help="Address of the collector.")
@click.option("--key", required=True, envvar="SFUMATO_SERVER_KEY", help="Its public key, in hex.")
@click.option("--study", required=True, help="Name of the study.")
@click.option(
    "--data", required=True, type=FILE, help="CSV, CSV.gz or Parquet file; .npy for vectors."
)
@click.option(
    "--kind",
    type=click.Choice(["examples", "femnist", "mnist", "shakespeare", "commits"]),
    help="To train a model: the kind of data, as for sfumato train.",
)
@click.option("--item-column", help='Column of items. Default: "item", or the first column.')
@click.option("--device-column", help="Column that names the device of each row.")
@click.option("--segment-column", help="Column of segments, for a study with segments.")
@click.option(
    "--devices", type=click.IntRange(min=1), help="Number of devices. Default: all in the data."
)
@click.option(
    "--days",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of simulated days.",
)
@click.option(
    "--pause",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Seconds to pause between days.",
)
@click.option(
    "--drop",
    type=click.FloatRange(0, 0.9),
    default=0.0,
    show_default=True,
    help="Rate of lost answers and repeated uploads.",
)
@click.option(
    "--leave",
    multiple=True,
    metavar="PHASE=SHARE",
    help="Share of devices that drop out of masked rounds in a phase (enrol, share, mask, ack, "
    "unmask).",
)
@click.option("--passcode", type=FILE, help="File with the study's passcode; - is stdin.")
@click.option("--seed", type=click.IntRange(min=0), help="Repeat a run, noise included.")
@click.option("--ca", type=FILE, help="Root certificates to use instead of the system's.")
@click.option("--plain-http", is_flag=True, help="Allow plain http to other machines.")
@json_option
def fleet_command(
    server: str,
    key: str,
    study: str,
    data: Path,
    kind: str | None,
    item_column: str | None,
    device_column: str | None,
    segment_column: str | None,
    devices: int | None,
    days: int,
    pause: float,
    drop: float,
    leave: tuple[str, ...],
    passcode: Path | None,
    seed: int | None,
    ca: Path | None,
    plain_http: bool,
    as_json: bool,
) -> None:
    """Answer a study with many simulated devices, over real HTTP

    Each device agrees to the study, records its items from the data and sends them when they are
    due. Its clock is simulated: days pass at once. With --drop, uploads are repeated and answers
    lost, as on a bad network; nothing is counted twice. Studies with trust "secure" run in masked
    rounds, in real time; with --leave, some devices drop out. With --kind, each client of the data
    helps to train a model.

    \b
    Example:
      sfumato fleet --server http://127.0.0.1:8420 --key 5c…0d --study "Trees" --data trees.csv
    """
    from sfumato.simulation.network_fleet import Holding, NetworkFleet, draw_holdings
    from sfumato.simulation.population import Population

    rates = _rates(leave)
    holdings: Sequence[Holding]
    if kind is not None:
        from sfumato.learn import data as loaders
        from sfumato.learn.local_update import trainers

        holdings = trainers(loaders.read(kind, data).train)[:devices]
    elif data.suffix == ".npy":
        from sfumato.simulation import vectors

        holdings = list(vectors.load(data))[:devices]
    else:
        population = Population.load(
            data,
            item_column=item_column,
            device_column=device_column,
            segment_column=segment_column,
        )
        holdings = draw_holdings(population, devices, seed)
    with (
        NetworkFleet(
            server,
            public_key(key),
            holdings,
            drop=drop,
            seed=seed,
            ca=ca,
            allow_plain=plain_http,
            passcode=None if passcode is None else passcodes.read(passcode),
        ) as fleet,
        progress_bar() as progress,
    ):
        summary = fleet.ask(
            study, days=days, pause_seconds=pause, dropout_rates=rates, progress=progress
        )
    if as_json:
        print_json(summary.to_dict())
    else:
        for name, value in summary.to_dict().items():
            text = json.dumps(value) if isinstance(value, dict) else f"{value:,}"
            if isinstance(value, float):
                text = f"{value:,.1f}"
            click.echo(f"{name:<10} {text}")
    if summary.unsent:
        raise ServiceError(
            f"all records must be sent; {summary.unsent:,} could not be",
            hint="simulated devices send the reports of whole days at once, faster than the "
            "collector accepts them: start it with SFUMATO_REPORTS_PER_SECOND=1000000"
            if 429 in summary.refused
            else "check that the collector is running and the study is open",
        )


def _rates(leave: Sequence[str]) -> dict[str, float]:
    """The share of devices that --leave gives for each phase."""
    rates = {}
    for text in leave:
        phase, _, share = text.partition("=")
        try:
            rates[phase] = float(share)
        except ValueError:
            rates[phase] = -1.0
        if not 0 <= rates[phase] <= 1:
            raise SpecError(f"--leave must be PHASE=SHARE, such as mask=0.05; got {text}")
    return rates
