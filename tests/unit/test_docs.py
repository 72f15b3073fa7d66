"""The documentation says what is true: its commands run, and nothing is left out.

Python examples in docs and README are doctests, which pytest runs by itself. Here run the console
examples. In README.md and docs/guides a page is a folder: each fenced block with a title, such as
```toml title="study.toml", is a file in it, and the ```console blocks are run there from top to
bottom. A line `$ sfumato …` is a command; what follows, up to the next `$`, is what it prints,
stdout and stderr together. `...` stands for anything and white space does not matter, as in a
doctest. A command must succeed unless it is output to print `error:`. Other commands
(`$ make demo`) are not run.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from databases import table_names
from sfumato import errors
from sfumato.cli.main import main
from sfumato.collector.requests import LIMITS
from sfumato.collector.store.database import SERVERS
from sfumato.device import box
from sfumato.flow.admission import Rejection
from sfumato.flow.release import Cost, CountRelease, Privacy, Release
from sfumato.privacy.noise_kinds import NOISES
from sfumato.study import QUESTIONS, Study
from unit.test_spec import our_kinds

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted((DOCS / "guides").glob("*.md"))]
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def fenced(text: str) -> Iterator[tuple[str, str]]:
    """Every fenced block: what stands behind the fence, and the block."""
    for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        yield match[1].strip(), match[2]


def titled(text: str) -> dict[str, str]:
    """The files that a page shows."""
    return {
        match[1]: block
        for head, block in fenced(text)
        if (match := re.search(r'title="(.+)"', head)) is not None
    }


def console(text: str) -> list[tuple[str, str]]:
    """The commands of a page and what each prints."""
    blocks = "".join(block for head, block in fenced(text) if head == "console")
    parts = re.split(r"^\$ (.*)\n", blocks, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def run(command: str) -> tuple[int, str]:
    """Exit code and everything that a `sfumato …` command prints, in this process and folder."""
    done = CliRunner(env={"NO_COLOR": "1"}).invoke(main, shlex.split(command)[1:])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def disagreement(page: str) -> str | None:
    """What is wrong with the first console example of a page that does not do what it shows."""
    for name, content in titled(page).items():
        Path(name).write_text(content, encoding="utf-8")
    for command, output in console(page):
        if not command.startswith("sfumato "):
            continue
        code, printed = run(command)
        if (code != 0) != ("error:" in output):
            return f"$ {command}\nexit code {code}\n{printed}"
        if not doctest.OutputChecker().check_output(output, printed, SAME):
            return f"$ {command}\nshown:\n{output}\nprinted:\n{printed}"
    return None


def words(*pages: Path) -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def commands(group: click.Group) -> dict[str, click.Command]:
    return {name: command for name, command in group.commands.items() if not command.hidden}


def generator() -> ModuleType:
    """scripts/generate_docs, which has no ending, as a module."""
    loader = SourceFileLoader("generate_docs", str(ROOT / "scripts" / "generate_docs"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None  # a loader was given
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_console_examples_print_what_they_show(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = disagreement(words(page))
    assert wrong is None, wrong


@pytest.mark.parametrize(
    "example",
    [
        "$ sfumato --version\nsfumato, version of another time\n",
        "$ sfumato nonsense\n...\n",
        "$ sfumato --version\nerror: ...\n",
    ],
    ids=["other output", "a failure not output", "a failure output that is none"],
)
def test_a_console_example_that_is_wrong_is_caught(example: str) -> None:
    assert disagreement(f"```console\n{example}```\n") is not None


def test_console_examples_are_found() -> None:
    examples = [command for page in PAGES for command, _ in console(words(page))]
    assert sum(command.startswith("sfumato ") for command in examples) >= 8


def test_generated_pages_are_up_to_date() -> None:
    stale = [
        page
        for page, expected in generator().expected_pages().items()
        if page.read_text(encoding="utf-8") != expected
    ]
    assert not stale, "run scripts/generate_docs"


def test_every_command_and_option_is_in_the_guides() -> None:
    text = words(*PAGES)
    missing = []
    for name, command in commands(main).items():
        if f"`sfumato {name}" not in text:
            missing.append(f"sfumato {name}")
        for option in command.params:
            missing += [
                f"{name} {flag}"
                for flag in option.opts
                if flag.startswith("--") and f"`{flag}`" not in text
            ]
    assert not missing


@pytest.mark.parametrize("name", commands(main))
def test_every_command_has_an_example_in_its_help(name: str) -> None:
    text = commands(main)[name].help or ""
    first, _, rest = text.partition("\n")
    assert not first.endswith(".")
    assert re.search(rf"^ +sfumato {name}", rest.partition("Example:")[2], re.MULTILINE)


def test_every_kind_of_spec_is_in_the_concepts() -> None:
    text = words(DOCS / "concepts" / "flow.md")
    rows = {kind: f"| `{kind}` | `{cls.__name__}` |" for kind, cls in our_kinds().items()}
    missing = [kind for kind, row in rows.items() if row not in text]
    assert not missing, f"docs/concepts/flow.md must have a row for {missing}"


QUESTION_NAMES = [f"`{name}`" for name in QUESTIONS]
DATABASES = ["SQLite", *(server.name for server in SERVERS)]
NAMES: dict[str, list[str]] = {  # what a page must name, in any case
    "README.md": [*QUESTION_NAMES, *NOISES, *DATABASES],
    "benchmarks/README.md": DATABASES,
    "docs/DATA_FLOW.md": DATABASES,
    "docs/concepts/flow.md": [*NOISES],
    "docs/guides/deploy.md": [*DATABASES, *(f"`{key}`" for key in LIMITS)],
    "docs/guides/reading_a_release.md": [
        *(f"`{each.name}`" for part in (Privacy, Cost) for each in fields(part)),
        *(f"`{column}`" for column in CountRelease.columns),
        *(f'"{each.name}"' for each in fields(Release)),
    ],
    "docs/guides/writing_a_study.md": [f'`"{name}"`' for name in QUESTIONS],
    "docs/index.md": [*QUESTION_NAMES, *NOISES],
    "docs/proofs/intervals.md": [*NOISES],
    "docs/proofs/ledger.md": DATABASES,
    "docs/proofs/noise.md": [*NOISES],
    "docs/proofs/samplers.md": [*NOISES],
    "docs/reference/questions.md": [
        f"::: {planner.partition(':')[0]}"
        for facts in QUESTIONS.values()
        for planner in facts.planners.values()
    ],
}


@pytest.mark.parametrize("page", NAMES)
def test_a_page_names_every_question_noise_database_or_field(page: str) -> None:
    text = words(ROOT / page).lower()
    missing = [name for name in NAMES[page] if name.lower() not in text]
    assert not missing, f"{page} must name {', '.join(missing)}"


def test_every_study_key_is_in_the_guide() -> None:
    text = words(DOCS / "guides" / "writing_a_study.md")
    missing = [field.name for field in fields(Study) if f"| `{field.name}` |" not in text]
    assert not missing, f"docs/guides/writing_a_study.md must have a row for {missing}"


def test_every_rejection_is_in_the_data_flow() -> None:
    text = words(DOCS / "DATA_FLOW.md")
    assert not [reason for reason in Rejection if f"| `{reason}` |" not in text]


def test_every_table_of_a_collector_and_of_a_device_is_in_the_data_flow() -> None:
    text = words(DOCS / "DATA_FLOW.md")
    statement = re.compile(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)")
    device, collector = statement.findall(str(box.TABLES)), table_names()
    assert {"state", "round"} <= set(device)
    assert {"upload", "round"} <= set(collector)
    for heading, tables in (("A device's file", device), ("The store's tables", collector)):
        section = text.partition(f"### {heading}\n")[2].partition("\n### ")[0]
        listed = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        assert not [table for table in tables if f"`{table}`" not in str(listed)]


def test_every_error_has_its_exit_code_in_the_guide() -> None:
    text = words(DOCS / "guides" / "command_line.md")
    raised = [
        name
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.SfumatoError)
    ]
    assert raised
    assert not [name for name in raised if f"`{name}`" not in text]


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name[:4])
def test_a_decision_says_what_would_reverse_it(page: Path) -> None:
    text = words(page)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        "Context",
        "Options",
        "Decision",
        "What it costs",
        "What would reverse it",
    ]
    assert text.startswith(f"# {page.name[:4]} ")


def test_every_page_of_docs_that_the_code_names_exists() -> None:
    named = {
        name
        for source in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"docs/[\w/.-]+\w", source.read_text(encoding="utf-8"))
    }
    assert named
    assert not [name for name in sorted(named) if not list(ROOT.glob(f"{name}*"))]
