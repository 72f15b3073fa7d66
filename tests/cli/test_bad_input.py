"""Bad input: one line that says what must hold, an exit code, never a traceback."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from running import within as sfumato

STUDY = """
question = "frequencies"
trust = "central"
epsilon = 1.0
delta = 1e-6
dictionary = "words.csv"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "words.csv").write_text("word\noak\nelm\nfir\n")
    return tmp_path


def simulate(folder: Path, data: bytes | str, *options: str) -> tuple[int, str, str]:
    (folder / "data.csv").write_bytes(data if isinstance(data, bytes) else data.encode())
    return sfumato(
        "simulate", "study.toml", "--data", "data.csv", "--seed", "1", *options, cwd=folder
    )


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ("", [], "data.csv is empty"),
        ("word\n", [], "the data has no rows"),
        ("word\noak\n", ["--item-column", "tree"], "no column 'tree'; its columns are word"),
        ("word\noak\n", ["--device-column", "user"], "no column 'user'"),
        ("word\noak\n", ["--count-column", "n"], "no column 'n'"),
        (b"word\noak\n\xff\xfe\n", [], "invalid UTF8"),
        ("word,n\noak,NaN\n", ["--count-column", "n"], "whole numbers of at least 0; got nan"),
        ("word,n\noak,1\n,2\n", [], "items must not be missing; got 1 missing value"),
        ("word,n\noak,\n", ["--count-column", "n"], "must not be missing"),
        ("word,n\noak,-3\n", ["--count-column", "n"], "whole numbers of at least 0; got -3"),
        ("word,n\noak,1.5\n", ["--count-column", "n"], "whole numbers of at least 0; got 1.5"),
        ("word,n\noak,inf\n", ["--count-column", "n"], "whole numbers of at least 0; got inf"),
        ("word,n\noak,0\n", ["--count-column", "n"], "must not all be zero"),
        ("word,n\noak,many\n", ["--count-column", "n"], "column 'n' of data.csv must be numbers"),
        ("word,n\noak,1\nelm,2,3\n", [], "Expected 2 columns, got 3"),
    ],
)
def test_unreadable_data_is_one_line_and_exit_2(
    folder: Path, data: bytes | str, options: list[str], says: str
) -> None:
    code, out, err = simulate(folder, data, *options)
    errors = [line for line in err.splitlines() if not line.endswith("…")]
    assert code == 2
    assert out == ""
    assert says in errors[0]
    assert errors[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in errors[1:])


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ('colour = "red"', 2, "unknown key colour"),
        ("epsilon = 0", 2, "epsilon must be above 0"),
        ("epsilon = -1.5", 2, "epsilon must be above 0"),
        ("epsilon = nan", 2, "a number must be finite"),
        ('epsilon = "much"', 2, "epsilon must be a number, or inf"),
        ("delta = 1.0", 2, "delta must be at least 0 and below 1"),
        ("devices = 0", 2, "devices must be at least 1"),
        ("devices = 2.5", 2, "devices of Study must be"),
        ("rounds = 0", 2, "rounds must be at least 1"),
        ("dropout = 1.0", 2, "dropout must be"),
        ("target_error = 2", 2, "target_error must be"),
        ("failure_probability = 1.0", 2, "failure_probability must be above 0 and below 1"),
        ("rows = 0", 2, "rows must be at least 1"),
        ("width = 1", 2, "width must be at least 2"),
        ("width = 64", 2, "rows and width are the sizes of count sketches; algorithm is not given"),
        ('preset = "apple"', 2, "preset must be one of wu-two-phase-2023"),
        (
            'preset = "apple-emoji-2017"',
            2,
            "preset apple-emoji-2017 has trust = local; got central",
        ),
        ('cohorts = "mixed"', 2, "cohorts of Study must be"),
        ('trust = "nobody"', 2, "trust of Study must be"),
        ('trust = "secure"\ndelta = 0.0', 1, "needs a delta above 0"),
        ('trust = "secure"\ndevices = 3', 1, "at least 4 devices per round"),
        ('trust = "local"\nitems_per_device = 2', 2, "items_per_device has no effect"),
        ('trust = "local"\nepsilon = inf', 2, "local privacy needs a finite epsilon"),
        ('trust = "local"\nbytes_per_device = 10', 1, "leaves only 0 bytes for a record"),
        ('trust = "local"\ntarget_error = 0.0001', 1, "the largest error over"),
        ('question = "why"', 2, "question must be one of"),
        ('dictionary = "none.csv"', 2, "there is no file"),
        ('dictionary_column = "tree"', 2, "no column 'tree'"),
        pytest.param(
            "epsilon = 0.001\ntarget_error = 0.001", 1, "the noise alone", marks=pytest.mark.slow
        ),
        ("epsilon =", 2, "is not TOML"),
    ],
)
def test_a_study_that_cannot_be_is_refused(folder: Path, change: str, code: int, says: str) -> None:
    keys = [line.split("=")[0].strip() for line in change.splitlines()]
    others = [line for line in STUDY.splitlines() if line.split("=")[0].strip() not in keys]
    study = "\n".join([*others, change, "" if "devices" in keys else "devices = 1000"])
    (folder / "study.toml").write_text(study)
    exit_code, out, err = sfumato("plan", "study.toml", cwd=folder)
    assert (exit_code, out) == (code, "")
    assert says in err.splitlines()[0]


def test_the_error_of_an_impossible_study_says_how_to_make_it_possible(folder: Path) -> None:
    study = STUDY + "devices = 1000\ntarget_error = 0.0001\n"
    (folder / "study.toml").write_text(study)
    code, _, err = sfumato("plan", "study.toml", cwd=folder)
    hint = err.splitlines()[1]
    assert code == 1
    assert hint.startswith("hint: ask ")
    devices = int(hint.split()[2].replace(",", ""))
    (folder / "study.toml").write_text(study.replace("1000", str(devices)))
    assert sfumato("plan", "study.toml", cwd=folder)[0] == 0


def test_the_error_of_too_few_bytes_says_how_many_are_enough(folder: Path) -> None:
    words = "word\n" + "".join(f"w{i}\n" for i in range(10_000))
    (folder / "words.csv").write_text(words)
    study = STUDY + 'algorithm = "count_sketch"\ndevices = 1000\nbytes_per_device = 100\n'
    (folder / "study.toml").write_text(study)
    code, _, err = sfumato("plan", "study.toml", cwd=folder)
    assert code == 1
    need = err.splitlines()[1].split()[4]
    (folder / "study.toml").write_text(study.replace("= 100\n", f"= {need}\n"))
    assert sfumato("plan", "study.toml", cwd=folder)[0] == 0


def test_strings_of_a_megabyte_are_items_like_others(folder: Path) -> None:
    long = "x" * 1_000_000
    (folder / "words.csv").write_text(f"word\noak\n{long}\n")
    code, out, err = simulate(folder, "word\n" + f"{long}\n" * 3 + "oak\n", "--json")
    assert (code, "Traceback" in err) == (0, False)
    assert long in out


@pytest.mark.slow
def test_ten_million_distinct_strings_are_counted(folder: Path) -> None:
    """In under a gigabyte: the peak is measured by benchmarks/speed/simulate.py."""
    numbers = pa.array(np.arange(10_000_000)).cast(pa.string())
    pq.write_table(pa.table({"word": numbers}), folder / "data.parquet")
    sketch = STUDY + 'algorithm = "count_sketch"\n'
    (folder / "study.toml").write_text(sketch + "bytes_per_device = 100\n")
    (folder / "words.csv").write_text("word\n" + "".join(f"{i}\n" for i in range(2_000)))
    code, out, err = sfumato(
        "simulate", "study.toml", "--data", "data.parquet", "--seed", "1", cwd=folder
    )
    assert code == 1, err  # a sketch of 100 bytes is refused before the data is counted
    (folder / "study.toml").write_text(sketch + "bytes_per_device = 5000\n")
    code, out, err = sfumato(
        "simulate", "study.toml", "--data", "data.parquet", "--seed", "1", cwd=folder
    )
    assert code == 0, err
    assert "10,000,000 devices" in out


@pytest.mark.parametrize("name", ["data.parquet", "data.csv.gz"])
def test_a_file_that_is_not_what_its_name_says_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text("word\noak\n")
    code, _, err = sfumato("simulate", "study.toml", "--data", name, cwd=folder)
    assert code == 2
    assert "cannot be read" in err


def test_csv_gz_and_parquet_give_what_csv_gives(folder: Path) -> None:
    text = "word\n" + "oak\n" * 30 + "elm\n" * 12
    _, plain, _ = simulate(folder, text, "--json")
    (folder / "data.csv.gz").write_bytes(gzip.compress(text.encode()))
    pq.write_table(pa.table({"word": ["oak"] * 30 + ["elm"] * 12}), folder / "data.parquet")
    for name in ("data.csv.gz", "data.parquet"):
        code, out, _ = sfumato(
            "simulate", "study.toml", "--data", name, "--seed", "1", "--json", cwd=folder
        )
        assert code == 0
        assert out.split('"estimates"')[1] == plain.split('"estimates"')[1]


@pytest.mark.parametrize("picture", ["answer.xyz", "answer", "nowhere/answer.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_charged(
    folder: Path, picture: str
) -> None:
    options = ("--ledger", "ledger.db", "--plot", picture)
    code, out, err = simulate(folder, "word\noak\nelm\n", *options)
    assert code in (1, 2)
    assert out == ""
    assert "picture must end in" in err or "no folder" in err
    assert not (folder / "ledger.db").exists()


def test_a_model_that_cannot_be_written_is_refused_before_it_is_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    (folder / "train.toml").write_text(
        'question = "train"\ntrust = "central"\nepsilon = 8.0\ndelta = 1e-3\nclip = 1.0\n'
        'rounds = 1\n[training]\nmodel = "softmax"\ncohort = 2\n'
    )
    options = ("--model", "model.onnx", "--ledger", "ledger.db")
    code, out, err = sfumato("train", "train.toml", "--data", "none.npz", *options, cwd=folder)
    assert (code, out) == (1, "")
    assert "needs the package onnx_ir" in err
    assert not (folder / "ledger.db").exists()
