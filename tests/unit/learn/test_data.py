from __future__ import annotations

import gzip
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from sfumato.errors import DataError, SpecError
from sfumato.learn import data
from sfumato.learn.data import BEGIN, CHARACTERS, END, PAD, SYMBOLS, UNKNOWN, Clients, Federated
from sfumato.reproduce.files import data_folder

FOLDER = data_folder()


def real(name: str) -> Path:
    if FOLDER is None or not (FOLDER / name).is_file():
        pytest.skip(f"{name} is not here")
    return FOLDER / name


def four_clients() -> Clients:
    return Clients(
        inputs=torch.arange(12.0).view(6, 2),
        targets=torch.arange(6),
        offsets=torch.tensor([0, 2, 2, 5, 6]),
    )


def test_clients_know_their_sizes() -> None:
    clients = four_clients()
    assert len(clients) == 4
    assert [clients.size(client) for client in range(4)] == clients.sizes.tolist() == [2, 0, 3, 1]
    for client in (-1, 4):
        with pytest.raises(SpecError, match="must be 0 to 3"):
            clients.size(client)


def test_clients_print_no_example() -> None:
    clients = four_clients()
    federated = Federated(clients, clients.inputs[:1], clients.targets[:1], "mine")
    assert repr(clients) == "Clients(4 clients, 6 examples)"
    assert repr(federated) == "Federated('mine', Clients(4 clients, 6 examples), 1 test examples)"


def test_examples_move_and_offsets_stay() -> None:
    moved = four_clients().to("meta")
    assert (moved.inputs.device.type, moved.targets.device.type) == ("meta", "meta")
    assert moved.offsets.device.type == "cpu"
    federated = Federated(four_clients(), torch.zeros(1, 2), torch.zeros(1).long(), "mine")
    assert federated.to("meta").test_inputs.device.type == "meta"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"offsets": torch.tensor([0, 3, 2, 6])}, "never decrease"),
        ({"offsets": torch.tensor([1, 6])}, "start at 0"),
        (
            {"offsets": torch.tensor([0, 5])},
            "inputs must have the last offset.s number of examples, 5",
        ),
        ({"offsets": torch.tensor([0.0, 6.0])}, "int64"),
        ({"inputs": torch.zeros(5, 2)}, "inputs must have"),
        ({"targets": torch.zeros(5).long()}, "targets must have"),
        ({"targets": torch.zeros(6).int()}, "targets must be int64"),
    ],
)
def test_clients_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    clients = four_clients()
    fields = {"inputs": clients.inputs, "targets": clients.targets, "offsets": clients.offsets}
    with pytest.raises(SpecError, match=message):
        Clients(**{**fields, **changed})


def test_test_examples_of_another_shape_are_refused() -> None:
    with pytest.raises(SpecError, match="shapes of the training examples"):
        Federated(four_clients(), torch.zeros(1, 3), torch.zeros(1).long(), "mine")
    with pytest.raises(SpecError, match="one target each"):
        Federated(four_clients(), torch.zeros(2, 2), torch.zeros(1).long(), "mine")


def test_examples_are_grouped_in_their_order() -> None:
    clients = data.group_by_client(
        torch.arange(5.0), torch.arange(5), torch.tensor([2, 0, 2, 0, 2]), 4
    )
    assert clients.targets.tolist() == [1, 3, 0, 2, 4]
    assert clients.sizes.tolist() == [2, 0, 3, 0]


def femnist_file(folder: Path, **changed: Any) -> Path:
    images = np.full((6, 28, 28), 255, dtype=np.uint8)
    images[:, 0, 0] = [0, 51, 102, 153, 204, 255]
    parts: dict[str, Any] = {
        "images": images,
        "labels": np.arange(6, dtype=np.uint8),
        "writer": np.array([2, 0, 2, 1, 2, 0], dtype=np.uint16),
        "split": np.array([0, 0, 1, 1, 0, 1], dtype=np.uint8),
        "writer_full": np.array([True, False, True]),
    }
    np.savez(folder / "femnist.npz", **{**parts, **changed})
    return folder / "femnist.npz"


def test_full_writers_train_and_all_are_tested(tmp_path: Path) -> None:
    federated = data.femnist(femnist_file(tmp_path))
    assert federated.not_covered == (data.TESTED_ON_CLIENTS,)
    assert federated.train.sizes.tolist() == [1, 2]  # writers 0 and 2
    assert federated.train.targets.tolist() == [1, 0, 4]
    assert federated.test_targets.tolist() == [2, 3, 5]
    ink = federated.train.inputs[:, 0, 0]
    assert ink.tolist() == pytest.approx([0.8, 1.0, 0.2])
    assert float(federated.train.inputs[:, 1:].max()) == 0.0  # paper
    assert federated.train.inputs.shape == (3, 28, 28)


def test_a_writer_that_is_not_described_is_refused(tmp_path: Path) -> None:
    path = femnist_file(tmp_path, writer_full=np.array([True, False]))
    with pytest.raises(DataError, match="names writer 2 and describes 2"):
        data.femnist(path)
    path = femnist_file(tmp_path, labels=np.zeros(5, dtype=np.uint8))
    with pytest.raises(DataError, match=r"labels of .* must have 6 entries"):
        data.femnist(path)


def mnist_folder(folder: Path) -> Path:
    for part, count in (("mnist-train", 8), ("mnist-t10k", 3)):
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        images[:, 5, 5] = np.arange(count) * 10
        header = b"".join(number.to_bytes(4, "big") for number in (2051, count, 28, 28))
        name = folder / f"{part}-images-idx3-ubyte.gz"
        name.write_bytes(gzip.compress(header + images.tobytes()))
        header = b"".join(number.to_bytes(4, "big") for number in (2049, count))
        labels = np.arange(count, dtype=np.uint8)
        name = folder / f"{part}-labels-idx1-ubyte.gz"
        name.write_bytes(gzip.compress(header + labels.tobytes()))
    np.savez(folder / "writers.npz", train_writer=np.array([7, 3, 7, 3, 9, 9, 9, 9]))
    return folder


def test_mnist_by_writer(tmp_path: Path) -> None:
    folder = mnist_folder(tmp_path)
    federated = data.mnist(folder, writers=folder / "writers.npz")
    assert federated.not_covered == ()
    assert federated.train.targets.tolist() == [1, 3, 0, 2, 4, 5, 6, 7]
    assert federated.train.sizes.tolist() == [2, 2, 4]
    inks = federated.train.inputs[:, 5, 5] * 255
    assert inks.tolist() == pytest.approx((federated.train.targets * 10).tolist())
    assert federated.test_targets.tolist() == [0, 1, 2]


def test_mnist_dealt_at_random(tmp_path: Path) -> None:
    folder = mnist_folder(tmp_path)
    dealt = [data.mnist(folder, clients=3, examples=2, seed=seed).train for seed in range(20)]
    for train in dealt:
        assert train.sizes.tolist() == [2, 2, 2]
        assert len(set(train.targets.tolist())) == 6
    assert len({tuple(train.targets.tolist()) for train in dealt}) > 1
    again = data.mnist(folder, clients=3, examples=2, seed=0).train
    assert torch.equal(again.targets, dealt[0].targets)
    with pytest.raises(DataError, match="3 clients of 3 need 9 examples; there are 8"):
        data.mnist(folder, clients=3, examples=3)


def test_mnist_is_split_in_one_way(tmp_path: Path) -> None:
    for options in ({}, {"clients": 3}, {"writers": "w", "clients": 3, "examples": 1}):
        with pytest.raises(SpecError, match="by writers, or into clients"):
            data.mnist(tmp_path, **options)


def test_files_that_are_no_idx_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read as gzipped idx"):
        data.mnist(tmp_path, clients=1, examples=1)
    folder = mnist_folder(tmp_path)
    (folder / "mnist-train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataError, match="must be an idx file of labels"):
        data.mnist(folder, clients=1, examples=1)
    (folder / "mnist-train-labels-idx1-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="cannot be read as gzipped idx"):
        data.mnist(folder, clients=1, examples=1)


def text_of(symbols: torch.Tensor) -> str:
    marks = {PAD: "_", BEGIN: "<", END: ">", UNKNOWN: "?", -1: "."}
    names = {place + UNKNOWN + 1: character for place, character in enumerate(CHARACTERS)}
    return "".join({**names, **marks}[symbol] for symbol in symbols.tolist())


def test_there_are_ninety_symbols() -> None:
    assert SYMBOLS == 90 == 4 + len(set(CHARACTERS))


def test_roles_become_sequences_of_characters(tmp_path: Path) -> None:
    path = tmp_path / "roles.parquet"
    table = pa.table(
        {
            "client": [4, 4, 4, 2, 2],
            "split": [0, 0, 1, 0, 1],
            "line": ["To be", "é, or", "not", "Ay", "No more words"],
        }
    )
    pyarrow.parquet.write_table(table, path)
    federated = data.shakespeare(path, length=7)
    assert federated.not_covered == (data.TESTED_ON_CLIENTS,)
    assert federated.train.sizes.tolist() == [1, 2]  # roles 2 and 4
    texts = [text_of(row) for row in federated.train.inputs]
    nexts = [text_of(row) for row in federated.train.targets]
    assert texts == ["<Ay>___", "<To be\n", "?, or>_"]
    assert nexts == ["Ay>....", "To be\n?", ", or>.."]
    assert [text_of(row) for row in federated.test_inputs] == ["<No mor", "e words", "<not>__"]
    assert [text_of(row) for row in federated.test_targets] == ["No more", " words>", "not>..."]


def test_sentences_become_sequences_of_words(tmp_path: Path) -> None:
    path = tmp_path / "commits.parquet"
    table = pa.table(
        {
            "user": [9, 9, 9, 5, 9],
            "split": [0, 0, 0, 0, 1],
            "text": ["fix the bug", "fix the the leak now", "bug", "fix fix", "fix seldom bug"],
        }
    )
    pyarrow.parquet.write_table(table, path)
    federated = data.commits(path, vocabulary=3, length=4, most=2)
    assert federated.not_covered == (data.SYMBOLS_OF_CLIENTS, data.TESTED_ON_CLIENTS)
    fix, the, bug = 4, 5, 6  # by use in training: 4, 3 and 2 times
    assert federated.train.sizes.tolist() == [1, 2]  # users 5 and 9, whose third is too many
    assert federated.train.inputs.tolist() == [
        [BEGIN, fix, fix, END],
        [BEGIN, fix, the, bug],
        [BEGIN, fix, the, the],
    ]
    assert federated.train.targets.tolist() == [
        [fix, fix, END, -1],
        [fix, the, bug, END],
        [fix, the, the, UNKNOWN],
    ]
    assert federated.test_targets.tolist() == [[fix, UNKNOWN, bug, END]]


def test_a_word_of_test_sentences_alone_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "commits.parquet"
    table = pa.table({"user": [1, 1], "split": [0, 1], "text": ["fix bug", "fix typo"]})
    pyarrow.parquet.write_table(table, path)
    assert data.commits(path).test_targets[0, :3].tolist() == [5, UNKNOWN, END]


def test_parquet_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "roles.parquet"
    with pytest.raises(DataError, match="there is no file"):
        data.shakespeare(path)
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        data.shakespeare(path)
    pyarrow.parquet.write_table(pa.table({"client": [1], "split": [0]}), path)
    with pytest.raises(DataError, match="has no column line; it has client, split"):
        data.shakespeare(path)
    table = pa.table({"client": [1], "split": [2], "line": ["a"]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=r"'split' of .* must be 0"):
        data.shakespeare(path)
    table = pa.table({"client": pa.array([None], pa.int64()), "split": [0], "line": ["a"]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=r"'client' of .* must have a value in every row"):
        data.shakespeare(path)
    pyarrow.parquet.write_table(pa.table({"client": ["x"], "split": [0], "line": ["a"]}), path)
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        data.shakespeare(path)


def own_file(folder: Path, **changed: Any) -> Path:
    parts: dict[str, Any] = {
        "inputs": np.arange(12.0).reshape(6, 2),
        "targets": np.array([0, 1, 0, 1, 0, 1]),
        "client": np.array([30, 10, 30, 20, 10, 30]),
        "split": np.array([0, 0, 0, 1, 0, 0]),
    }
    parts = {name: part for name, part in {**parts, **changed}.items() if part is not None}
    np.savez(folder / "mine.npz", **parts)
    return folder / "mine.npz"


def test_data_of_ones_own(tmp_path: Path) -> None:
    federated = data.load(own_file(tmp_path))
    assert federated.name == "mine"
    assert federated.train.sizes.tolist() == [2, 3]  # 10 and 30; 20 has a test example only
    assert federated.train.inputs[:, 0].tolist() == [2, 8, 0, 4, 10]
    assert federated.train.inputs.dtype == torch.float32
    assert federated.train.targets.tolist() == [1, 0, 0, 0, 1]
    assert federated.test_inputs.tolist() == [[6.0, 7.0]]


def test_without_a_split_there_is_nothing_to_test_on(tmp_path: Path) -> None:
    federated = data.load(own_file(tmp_path, split=None))
    assert federated.train.sizes.tolist() == [2, 1, 3]
    assert federated.test_inputs.shape == (0, 2)


def test_whole_numbers_are_symbols(tmp_path: Path) -> None:
    inputs = np.arange(18, dtype=np.uint8).reshape(6, 3)
    federated = data.load(own_file(tmp_path, inputs=inputs, targets=inputs.astype(np.int16) - 1))
    assert federated.train.inputs.dtype == torch.int64
    assert int(federated.train.targets.min()) == -1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"targets": None}, "has no targets; it has inputs, client, split"),
        ({"inputs": np.full((6, 2), math.nan)}, "must be finite; example 0 and 5 more are not"),
        ({"inputs": np.full((6, 2), 1e300)}, "must fit in 32 bits"),
        ({"inputs": np.full((6, 2), -1)}, "symbols in inputs of .* must be at least 0"),
        ({"inputs": np.full((6, 2), "a")}, "inputs of .* must be numbers; got <U1"),
        ({"targets": np.zeros(5, dtype=int)}, "targets of .* must have 6 entries"),
        ({"targets": np.full(6, "a")}, "targets of .* must be numbers; got <U1"),
        ({"targets": np.full(6, np.nan)}, "targets of .* must be finite; example 0 and 5 more"),
        ({"client": np.zeros((6, 2), dtype=int)}, "client of .* must be one number per example"),
        ({"client": np.zeros(7, dtype=int)}, "client of .* must have 6 entries"),
        ({"client": np.array(3)}, "client of .* must be an array with one entry per example"),
        ({"split": np.full(6, 2)}, r"split of .* must be 0 \(train\) or 1 \(test\)"),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        data.load(own_file(tmp_path, **changed))


def test_a_file_without_examples_is_refused(tmp_path: Path) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    path = own_file(
        tmp_path, inputs=np.zeros((0, 2)), targets=nothing, client=nothing, split=nothing
    )
    with pytest.raises(DataError, match="has no examples"):
        data.load(path)


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    with pytest.raises(DataError, match="there is no file"):
        data.load(path)
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        data.load(path)
    np.savez(path, inputs=np.array([{"a": 1}], dtype=object), targets=[0], client=[0])
    with pytest.raises(DataError, match="without pickles"):
        data.load(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"must be an \.npz with inputs, targets, client"):
        data.load(tmp_path / "one.npy")


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    first = data.load(own_file(tmp_path))
    data.save(tmp_path / "again.npz", first)
    again = data.load(tmp_path / "again.npz")
    for part in ("inputs", "targets", "offsets"):
        assert torch.equal(getattr(first.train, part), getattr(again.train, part))
    assert torch.equal(first.test_inputs, again.test_inputs)
    assert torch.equal(first.test_targets, again.test_targets)


def test_the_real_femnist() -> None:
    federated = data.femnist(real("femnist_leaf.npz"))
    assert (len(federated.train), len(federated.train.targets)) == (396, 54_109)
    assert len(federated.test_targets) == 6_250 + 9_256
    assert int(federated.train.targets.max()) == 61
    assert 0 < float(federated.train.inputs.mean()) < 0.3  # ink on paper, not paper on ink


def test_the_real_mnist_by_writer() -> None:
    path = real("mnist_writers.npz")
    real("mnist-train-images-idx3-ubyte.gz")
    train = data.mnist(path.parent, writers=path).train
    assert (len(train), len(train.targets)) == (539, 60_000)
    assert (int(train.sizes.min()), int(train.sizes.max())) == (19, 131)


def test_the_real_roles_of_shakespeare() -> None:
    federated = data.shakespeare(real("shakespeare_roles.parquet"))
    assert len(federated.train) == 1_238
    assert federated.train.inputs.shape[1] == 80
    assert not (federated.train.inputs == UNKNOWN).any()
    assert int(federated.train.inputs.max()) < SYMBOLS
    # Every character once, and END: one target for each but BEGIN.
    assert int((federated.train.targets == END).sum()) == 1_238


def test_the_real_commits() -> None:
    federated = data.commits(real("commit_sequences.parquet"))
    assert len(federated.train) == 9_448
    assert len(federated.train.targets) + len(federated.test_targets) == 223_216
    assert int(federated.train.targets.max()) == 10_003
    counted = federated.train.targets != -1
    unknown = (federated.train.targets == UNKNOWN).sum() / counted.sum()
    assert 0 < float(unknown) < 0.06


# Examples in memory


def test_examples_in_memory_are_grouped_by_client() -> None:
    """Arrays, tensors and lists mean the same; a client may have none."""
    inputs, targets = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 3, 4, 5])
    pairs = [
        (inputs[:2], targets[:2]),
        (np.zeros((0, 2)), np.zeros(0)),
        (torch.tensor(inputs[2:5], requires_grad=True), torch.tensor(targets[2:5])),
        (inputs[5:].tolist(), targets[5:].tolist()),
    ]
    federated = Federated.of(pairs, test=(inputs[:1], targets[:1]), public_test=True)
    expected = four_clients()
    assert torch.equal(federated.train.inputs, expected.inputs)
    assert torch.equal(federated.train.targets, expected.targets)
    assert torch.equal(federated.train.offsets, expected.offsets)
    assert (len(federated.test_inputs), federated.public_test) == (1, True)
    named = Federated.of(dict(zip("abcd", pairs, strict=True)))
    assert torch.equal(named.train.inputs, expected.inputs)
    assert len(named.test_targets) == 0
    numbers = Federated.of([(inputs, inputs + 0.5)]).train.targets
    assert (numbers.dtype, tuple(numbers.shape)) == (torch.float32, (6, 2))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "at least one client must have examples"),
        ([(np.zeros((2, 3)), np.zeros(3))], "client 0 must have as many targets as inputs"),
        ([(np.zeros((2, 3)),)], "client 0 must be a pair"),
        (
            [(np.zeros((2, 3)), np.zeros(2)), (np.zeros((2, 4)), np.zeros(2))],
            r"one shape.*got \(3,\), \(\) and \(4,\), \(\)",
        ),
        ([([["a"]], [0])], "inputs of client 0 must be numbers"),
        ([([[math.inf]], [0])], "inputs of client 0 must be finite; example 0"),
    ],
)
def test_examples_in_memory_that_cannot_be_are_refused(pairs: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Federated.of(pairs)


HOMES: dict[str, list[Any]] = {
    "owner": ["b", "a", "b", "c", "c"],
    "area": [50, 70, 65, 80, 90],
    "rooms": [2.0, 3.0, 2.5, 4.0, 5.0],
    "price": [1.5, 2.5, 2.0, 3.0, 4.0],
    "rent": [5, 6, 7, 8, 9],
    "held": [0, 0, 0, 1, 1],
}


@pytest.mark.parametrize("kind", ["columns", "pandas", "polars"])
def test_rows_of_a_data_frame_are_examples_of_their_owners(kind: str) -> None:
    table: Any = HOMES if kind == "columns" else importlib.import_module(kind).DataFrame(HOMES)
    federated = Federated.from_table(table, client="owner", targets=["price", "rent"], split="held")
    train = federated.train
    assert train.sizes.tolist() == [2, 1]
    assert train.inputs.tolist() == [[50, 2.0], [65, 2.5], [70, 3.0]]
    assert train.inputs.dtype == torch.float32  # numbers, although areas are whole
    assert train.targets.tolist() == [[1.5, 5], [2.0, 7], [2.5, 6]]
    assert federated.test_targets.tolist() == [[3.0, 8], [4.0, 9]]
    classes = Federated.from_table(table, client="owner", targets="rent").train
    assert (len(classes), classes.targets.dtype) == (3, torch.int64)


@pytest.mark.parametrize("split", [[0, 0, 0, 1, 1], [False, False, False, True, True]])
def test_rows_to_test_on_are_true_or_1(split: list[Any]) -> None:
    table = HOMES | {"held": split}
    federated = Federated.from_table(table, client="owner", targets="price", split="held")
    assert federated.test_targets.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["train", "train", "train", "test", "test"], "true or 1 .*; got string"),
        ([0.0, 0.0, 0.0, 1.0, 1.0], "true or 1 .*; got double"),
        ([1, 1, 1, 2, 2], "true or 1 .*; got 2"),
        ([0] * 5, "all 5 rows are to train on"),
        ([True] * 5, "all 5 rows are to test on"),
    ],
)
def test_other_splits_are_refused(split: list[Any], message: str) -> None:
    table = HOMES | {"held": split}
    with pytest.raises(DataError, match=message):
        Federated.from_table(table, client="owner", targets="price", split="held")


@pytest.mark.parametrize("table", ["homes.csv", Path("homes.csv"), 5])
def test_a_path_is_no_table(table: Any) -> None:
    with pytest.raises(DataError, match="must be a data frame") as problem:
        Federated.from_table(table, client="owner", targets="price")
    assert "pandas.read_csv" in str(problem.value.hint)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"client": "name"}, "no column 'name'; it has owner, area"),
        (
            {"owner": [None, "a", "b", "c", "c"]},
            {},
            "column 'owner' of the table must have a value",
        ),
        ({"rooms": [None, 3.0, 2.5, 4.0, 5.0]}, {}, r"'rooms' .* finite; row 0 .* and 0 more"),
        ({"rooms": list("abcde")}, {}, "column 'rooms' of the table must be numbers; got string"),
        ({"price": list("abcde")}, {}, "column 'price' of the table must be numbers; got string"),
        ({"price": [1.0, math.nan, 1.0, 1.0, 1.0]}, {}, r"'price' .* finite; row 1 "),
        (
            {},
            {"targets": ["area", "rooms", "price", "rent", "held"]},
            "must have columns of inputs",
        ),
    ],
)
def test_tables_without_the_columns_are_refused(
    change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Federated.from_table(HOMES | change, **{"client": "owner", "targets": "price"} | options)
