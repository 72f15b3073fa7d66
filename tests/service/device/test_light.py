"""A device needs only numpy and cryptography: it works from end to end with all else refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.device.standin import PUBLIC, StandIn, running
from service.device.test_device import HASHED, WORDS, central, direct, items_of, sparse
from service.device.test_models import BODY, LENGTH, offer_with
from sfumato.sketch import TextKeys, WordKeys

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]
(DEVICES,) = (each for each in CONTRACTS if each.get("source_modules") == ["sfumato.device"])
HEAVY = (*DEVICES["forbidden_modules"], "llvmlite", "pandas")  # the last two: by others
DEVICE = f"""
import sys
HEAVY = {HEAVY!r}
from sfumato.device import Device
path, server, key, *studies = sys.argv[1:]
NOON = 20_000 * 86_400 + 43_200.0
with Device.open(path, server, bytes.fromhex(key)) as device:
    assert [offered.offer.study for offered in device.offers(NOON)] == studies
    for study in studies:
        device.consent(study)
        print(device.record(study, "elm", NOON))
    print(device.send(NOON + 9 * 86_400).delivered)
print(*sorted(set(HEAVY) & set(sys.modules)))
"""
REFUSING = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"a device does without {{name}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def server() -> Iterator[StandIn]:
    with running() as server:
        yield server


def output_of(python: str, script: str, server: StandIn, folder: Path, **environment: str) -> str:
    """The output of a device in a separate process that takes part in a study of each kind."""
    offers = [
        central(server),
        sparse(central(server)),
        items_of(TextKeys(length=64), "Any trees"),
        items_of(WordKeys(alphabet="elmnop", length=10), "Some trees"),
        direct(server),
        WORDS,
    ]
    server.offer(*offers)
    process = subprocess.run(
        [python, "-c", textwrap.dedent(script), str(folder / "box.db"), server.url, PUBLIC.hex()]
        + [offer.study for offer in offers],
        env={"PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert [len(message) for message in server.messages if len(message) != 1] == [
        offer.task.message_bytes for offer in sorted(offers, key=lambda offer: offer.task.id)
        if offer.task.message_bytes != 1
    ]  # fmt: skip
    return process.stdout


def test_a_device_runs_where_nothing_heavy_can_be_imported(server: StandIn, tmp_path: Path) -> None:
    output = output_of(sys.executable, REFUSING + DEVICE, server, tmp_path)
    assert output.split("\n") == [*["kept"] * 6, "6", "", ""]


def test_a_device_imports_nothing_heavy_where_it_could(server: StandIn, tmp_path: Path) -> None:
    output = output_of(sys.executable, DEVICE, server, tmp_path)
    assert output.split("\n") == [*["kept"] * 6, "6", "", ""]


def test_the_refusal_would_be_noticed() -> None:
    process = subprocess.run(
        [sys.executable, "-c", REFUSING + "import sfumato.planning"],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert "a device does without pyarrow" in process.stderr


@pytest.mark.slow
def test_a_device_runs_with_numpy_and_cryptography_alone(server: StandIn, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "numpy", "cryptography"], check=True)
    output = output_of(python, DEVICE, server, tmp_path)
    assert output.split("\n") == [*["kept"] * 6, "6", "", ""]


def test_the_names_of_the_package_are_there_when_they_are_used() -> None:
    script = """
    import sfumato
    assert set(sfumato.__all__) <= set(dir(sfumato))
    import sfumato.planning, sfumato.simulation.simulate
    from sfumato import *
    assert callable(plan) and callable(sfumato.plan) and callable(sfumato.simulate)
    assert sfumato.Study is Study and issubclass(sfumato.SfumatoError, Exception)
    try:
        sfumato.nothing
    except AttributeError as problem:
        print(problem)
    """
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == "module 'sfumato' has no attribute 'nothing'\n"


def test_an_update_of_a_model_needs_no_torch() -> None:
    """The device's part in training a model, from the offer to the table."""
    script = REFUSING + (
        "import numpy as np\nfrom sfumato.device.private import masked_table\n"
        "from sfumato.privacy import SystemRng\nfrom sfumato.spec import from_json\n"
        "offer = from_json(sys.argv[1])\n"
        "train = lambda terms, parameters, rng: 0.25 * parameters\n"
        "print(masked_table(offer, train, None, bytes.fromhex(sys.argv[2]))(SystemRng()).size)\n"
    )
    from sfumato.spec import to_json

    process = subprocess.run(
        [sys.executable, "-c", script, to_json(offer_with()), BODY.hex()],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{LENGTH}\n"


def test_hashed_items_need_no_arrow(server: StandIn) -> None:
    """The one randomizer that the devices above do not use."""
    script = REFUSING + (
        "from sfumato.flow.contribute import local_report\nfrom sfumato.privacy import SystemRng\n"
        "from sfumato.spec import from_json\nimport sfumato.device.offers\n"
        "offer = from_json(sys.argv[1])\n"
        "print(len(local_report(offer.task, ['oak'], rng=SystemRng()).message))\n"
    )
    from sfumato.spec import to_json

    process = subprocess.run(
        [sys.executable, "-c", script, to_json(HASHED)],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == f"{HASHED.task.message_bytes}\n"
