"""What a plain install can do, and what it says where an extra is missing."""

from __future__ import annotations

import importlib.metadata
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sfumato.cli.main import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
STUDY = """\
question = "frequencies"
trust = "central"
epsilon = 1.0
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    ("package", "command"),
    [("fastapi", ["serve", "--check"]), ("uvicorn", ["demo"])],
)
def test_a_command_without_its_extra_says_which_one_to_install(
    package: str, command: list[str], tmp_path: Path
) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from sfumato.cli.main import main; main({command!r})"
    )
    result = run(sys.executable, "-c", code, cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"sfumato[{EXTRAS[package]}]" in result.stderr


def test_every_package_of_a_named_extra_is_required_by_it() -> None:
    required = importlib.metadata.requires("sfumato") or []
    distributions = {"starlette": "fastapi", "distributed": "dask"}
    for package, extra in EXTRAS.items():
        name = distributions.get(package, package).replace("_", "-")
        pattern = rf"{name}\b.*extra == ['\"]{extra}['\"]"
        assert any(re.match(pattern, line) for line in required), package


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_without_extras_plans_and_simulates(tmp_path: Path) -> None:
    """From the built wheel, in an environment of its own that has nothing else."""
    built = run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", ".", str(ROOT), cwd=tmp_path
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("sfumato-*.whl")
    python = str(tmp_path / "env" / "bin" / "python")
    sfumato = str(tmp_path / "env" / "bin" / "sfumato")
    assert run(sys.executable, "-m", "venv", "env", cwd=tmp_path).returncode == 0
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        str(ROOT / "constraints.txt"),
        str(wheel),
    ]
    installed = run(*install, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "fleet.csv").write_text("item\n" + "oak\n" * 600 + "elm\n" * 300)
    assert "Usage: sfumato" in run(sfumato, "--help", cwd=tmp_path).stdout
    answer = run(sfumato, "simulate", "study.toml", "--data", "fleet.csv", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "oak" in answer.stdout
    for command in (["demo"], ["serve", "--check"]):
        missing = run(sfumato, *command, cwd=tmp_path)
        assert missing.returncode == 2, missing.stderr
        assert 'pip install "sfumato[server]"' in missing.stderr
        assert "Traceback" not in missing.stderr
    assert list(tmp_path.glob("env/lib/*/site-packages/sfumato/py.typed"))


@pytest.mark.slow
def test_a_demo_that_is_terminated_leaves_no_collector(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "sfumato", "demo", "--devices", "200"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert demo.stderr is not None  # it is a pipe
    with demo, demo.stderr:
        address = demo.stderr.readline().split()[-1].removesuffix("/dashboard")
        demo.terminate()
        demo.stderr.read()
        assert demo.wait(timeout=120) == 128 + signal.SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}/health", timeout=5)  # noqa: S310  # it is on loopback
