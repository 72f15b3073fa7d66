"""What a plain install can do, and what it says where an extra is missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from sfumato.cli.main import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
STUDY = """\
question = "frequencies"
trust = "central"
epsilon = 1.0
"""


def run(*command: str, cwd: Path, seconds: int = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=seconds)


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


class Environment:
    """An environment with the built wheel and, if `base` is given, with what is installed there."""

    def __init__(
        self, folder: Path, base: Environment | None = None, *, python: str = sys.executable
    ) -> None:
        self.folder = folder
        assert run(python, "-m", "venv", str(folder), cwd=folder.parent).returncode == 0
        (self.site,) = folder.glob("lib/*/site-packages")
        if base is not None:
            (self.site / "base.pth").write_text(str(base.site))

    def install(self, requirement: str) -> None:
        command = ["-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), requirement]
        result = self.python(*command, seconds=1_200)
        assert result.returncode == 0, result.stderr

    def python(self, *arguments: str, seconds: int = 280) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "bin" / "python"), *arguments]
        return run(*command, cwd=self.folder.parent, seconds=seconds)

    def sfumato(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "sfumato", *arguments)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", ".", str(ROOT), cwd=folder
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("sfumato-*.whl")
    return path


@contextmanager
def on_disk() -> Iterator[Path]:
    """A folder that is not in memory, unlike those of pytest: environments are large."""
    with tempfile.TemporaryDirectory(prefix="sfumato-install-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def core(wheel: Path) -> Iterator[Environment]:
    """The wheel without extras, beside a study and its data."""
    with on_disk() as folder:
        environment = Environment(folder / "env")
        environment.install(str(wheel))
        write_study(folder)
        yield environment


@pytest.fixture
def folder() -> Iterator[Path]:
    with on_disk() as folder:
        yield folder


def write_study(folder: Path) -> None:
    (folder / "study.toml").write_text(STUDY)
    (folder / "fleet.csv").write_text("item\n" + "oak\n" * 600 + "elm\n" * 300)


SIMULATE = ("simulate", "study.toml", "--data", "fleet.csv")
STORE = "postgresql://collector@127.0.0.1:1/none"  # nobody listens there
NEEDS = {  # a command that needs an extra, and how it ends with the extra: its code and its words
    "plot": ((*SIMULATE, "--plot", "out.png"), 0, "oak"),
    "server": (("serve", "--check"), 0, "# checks"),
    "postgres": (("serve", "--check", "--store", STORE), 1, "cannot be reached"),
    "cluster": (("fold", "none", "--engine", "dask", "--workers", "1"), 2, "none"),
    "learn": (("train", "study.toml", "--data", "none.npz"), 2, "none.npz"),
}


@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_the_wheel_without_extras_plans_and_simulates(core: Environment) -> None:
    """In an environment of its own that has nothing else."""
    assert "Usage: " in core.sfumato("--help").stdout
    answer = core.sfumato(*SIMULATE)
    assert answer.returncode == 0, answer.stderr
    assert "oak" in answer.stdout
    assert (core.site / "sfumato" / "py.typed").exists()
    for extra, (command, _, _) in {**NEEDS, "server": (("demo",), 0, "")}.items():
        missing = core.sfumato(*command)
        assert missing.returncode in (1, 2), missing.stderr
        assert "Traceback" not in missing.stderr
        # A store on PostgreSQL needs the collector first.
        assert f"sfumato[{'server' if extra == 'postgres' else extra}]" in missing.stderr


@pytest.mark.slow
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("extras", [*NEEDS, ",".join(NEEDS)])
def test_each_extra_has_everything_for_its_commands(
    wheel: Path, core: Environment, folder: Path, extras: str
) -> None:
    """The extra alone, beside what sfumato always needs; and all of them together."""
    environment = Environment(folder / "env", core)
    environment.install(f"sfumato[{extras}] @ {wheel.as_uri()}")
    write_study(folder)
    check_commands(environment, extras.split(","))


@pytest.mark.slow
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("extras", [[], [*NEEDS]], ids=["core", "extras"])
@pytest.mark.parametrize("python", ["python3.12", "python3.13", "python3.14"])
def test_the_wheel_works_with_later_pythons(
    wheel: Path, folder: Path, python: str, extras: list[str]
) -> None:
    """Without extras, and with all of them together."""
    interpreter = working(python)
    if interpreter is None:
        pytest.skip(f"no {python} that works: neither on the PATH nor among those of uv and pyenv")
    environment = Environment(folder / "env", python=interpreter)
    environment.install(f"sfumato[{','.join(extras)}] @ {wheel.as_uri()}")
    write_study(folder)
    version = environment.python("-c", "import sys; print('python%d.%d' % sys.version_info[:2])")
    assert version.stdout.strip() == python
    answer = environment.sfumato(*SIMULATE)
    assert answer.returncode == 0, answer.stderr
    assert "oak" in answer.stdout
    check_commands(environment, extras)


def working(python: str) -> str | None:
    """An interpreter of that name; a command of pyenv works only if its version is switched on."""
    homes = {
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions",
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python")),
    }
    others = [str(path) for home in homes for path in home.glob(f"*/bin/{python}")]
    for path in filter(None, [shutil.which(python), *sorted(others)]):
        if subprocess.run([path, "-V"], check=False, capture_output=True).returncode == 0:
            return path
    return None


def check_commands(environment: Environment, extras: list[str]) -> None:
    """Each extra's command works, and asks for no other."""
    for extra in extras:
        command, code, words = NEEDS[extra]
        result = environment.sfumato(*command)
        assert result.returncode == code, result.stderr
        assert words in result.stdout + result.stderr
        assert "pip install" not in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_a_first_answer_about_a_data_frame_takes_five_lines_and_less_than_five_minutes(
    wheel: Path, folder: Path
) -> None:
    """The lines are those of docs/guides/install.md. The minutes are the processor's: how long a
    download takes, or what else this machine does, is not ours."""
    page = (ROOT / "docs" / "guides" / "install.md").read_text()
    lines = re.findall(r"^>>> (.*)$", page, re.MULTILINE)
    assert len(lines) <= 6
    (folder / "first.py").write_text("\n".join([*lines[:-1], f"print({lines[-1]})"]))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = Environment(folder / "env")
    environment.install(str(wheel))
    environment.install("pandas")
    answer = environment.python("first.py")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0, answer.stderr
    assert "oak" in answer.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 300


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
        (line,) = islice((line for line in demo.stderr if line.startswith("dashboard")), 1)
        address = line.split()[-1].removesuffix("/dashboard")
        demo.terminate()
        demo.stderr.read()
        assert demo.wait(timeout=120) == 128 + signal.SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}/health", timeout=5)  # noqa: S310  # it is on loopback
