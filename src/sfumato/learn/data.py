"""Clients and their examples: the container, the papers' data sets and your own.

A loader reads a file and returns a `Federated`: clients to train on and one set of examples to test
on. Inputs are numbers (float32) or symbols (int64). A target is a class, or one class per time step
of a sequence; −1 means that there is nothing to predict, and is left out of every loss.
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sfumato import files
from sfumato.arrays import I64, U8, Bool
from sfumato.errors import DataError, SpecError
from sfumato.spec import require

if TYPE_CHECKING:
    import pyarrow as pa


Examples: TypeAlias = tuple[npt.ArrayLike | Tensor, npt.ArrayLike | Tensor]
"""Inputs and targets, one of each for every example."""
IGNORED = -1  # a target that counts for nothing
PAD, BEGIN, END, UNKNOWN = range(4)  # symbols that are neither characters nor words
CHARACTERS = (
    "\n !\"#$%&'()*+,-./:;?@[]_0123456789"
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)  # 86, so that there are 90 symbols, as in paper 002
SYMBOLS = UNKNOWN + 1 + len(CHARACTERS)
TESTED_ON_CLIENTS = "accuracy and loss were computed exactly on clients' held-out data"
SYMBOLS_OF_CLIENTS = "the vocabulary was counted exactly from clients' data"
_MNIST = "{part}-{kind}-ubyte.gz"
_MNIST_BYTES = {"images": (16, 2051), "labels": (8, 2049)}  # header bytes and magic number


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Clients:
    """The examples of many clients, grouped by client.

    Client i holds examples `offsets[i]` to `offsets[i + 1]` − 1. `inputs` is (examples, …),
    `targets` (examples, …) as well: int64 for classes, or floating-point numbers. `offsets`,
    (clients + 1,), stays on the CPU, where work is scheduled.
    """

    inputs: Tensor
    targets: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        offsets = self.offsets
        require(
            offsets.ndim == 1 and offsets.dtype == torch.int64 and offsets.device.type == "cpu",
            "offsets must be one row of int64 on the CPU",
        )
        require(
            len(offsets) >= 1 and int(offsets[0]) == 0 and bool((offsets.diff() >= 0).all()),
            "offsets must start at 0 and never decrease",
        )
        for name, part in (("inputs", self.inputs), ("targets", self.targets)):
            require(
                part.ndim >= 1 and part.shape[0] == int(offsets[-1]),
                f"{name} must have the last offset's number of examples, {int(offsets[-1])};"
                f" got shape {tuple(part.shape)}",
            )
        require(
            self.targets.dtype == torch.int64 or self.targets.is_floating_point(),
            f"targets must be int64 or floating-point numbers; got {self.targets.dtype}",
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:  # never an example
        return f"Clients({len(self)} clients, {self.targets.shape[0]} examples)"

    def size(self, client: int) -> int:
        """The number of examples that a client holds."""
        if not 0 <= client < len(self):
            raise SpecError(f"a client must be 0 to {len(self) - 1}; got {client}")
        return int(self.offsets[client + 1] - self.offsets[client])

    def examples(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's inputs and targets."""
        start = int(self.offsets[client])
        part = slice(start, start + self.size(client))
        return self.inputs[part], self.targets[part]

    @property
    def sizes(self) -> Tensor:
        """The number of examples that each client holds, (clients,)."""
        return self.offsets.diff()

    def to(self, device: torch.device | str) -> Clients:
        """A copy with inputs and targets on a device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Federated:
    """Clients to train on, and test examples of the same shape.

    Accuracy and loss are computed exactly, without noise. Set `public_test` only if no client's
    data are among the test examples; otherwise every release says that they are not covered.
    """

    train: Clients
    test_inputs: Tensor
    test_targets: Tensor
    name: str
    public_test: bool = False
    public_symbols: bool = True  # the numbering of words does not depend on clients' data

    def __post_init__(self) -> None:
        require(
            self.test_inputs.shape[1:] == self.train.inputs.shape[1:]
            and self.test_targets.shape[1:] == self.train.targets.shape[1:]
            and self.test_inputs.shape[0] == self.test_targets.shape[0],
            "test examples must have the shapes of the training examples, and one target each",
        )

    @classmethod
    def of(
        cls,
        clients: Mapping[Any, Examples] | Sequence[Examples],
        *,
        test: Examples | None = None,
        public_test: bool = False,
        name: str = "clients",
    ) -> Federated:
        """Examples in memory: each client's inputs and targets, as arrays or tensors, and those to
        test on.

        Inputs are real numbers, or whole numbers ≥ 0 that stand for symbols; targets are classes,
        or real numbers for a loss of your own.

        >>> Federated.of({"ann": ([[0.5, 1.0]], [1]), "bob": ([[0.1, 0.2], [0.3, 0.4]], [0, 1])})
        Federated('clients', Clients(2 clients, 3 examples), 0 test examples)
        """
        values = clients.values() if isinstance(clients, Mapping) else clients
        parts = [_pair(f"client {number}", each) for number, each in enumerate(values)]
        offsets = torch.tensor([0, *(len(targets) for _, targets in parts)]).cumsum(0)
        parts = [part for part in parts if len(part[1])]
        if not parts:
            raise DataError("at least one client must have examples")
        inputs, targets = parts[0]
        held_out = (inputs[:0], targets[:0]) if test is None else _pair("the test set", test)
        shapes = {(each.shape[1:], others.shape[1:]) for each, others in (*parts, held_out)}
        if len(shapes) > 1:
            several = " and ".join(sorted(f"{tuple(one)}, {tuple(two)}" for one, two in shapes))
            raise DataError(
                f"all inputs must have one shape, and so must all targets; got {several}"
            )
        return cls(
            train=Clients(
                torch.cat([each for each, _ in parts]),
                torch.cat([each for _, each in parts]),
                offsets,
            ),
            test_inputs=held_out[0],
            test_targets=held_out[1],
            name=name,
            public_test=public_test,
        )

    @classmethod
    def from_table(
        cls,
        table: Any,
        *,
        client: str,
        targets: str | Sequence[str],
        split: str | None = None,
        public_test: bool = False,
        name: str = "table",
    ) -> Federated:
        """Examples as rows of a data frame, an Arrow table or a mapping of columns.

        The column `client` says whose a row is, one or several columns are `targets`, and `split`
        is true, or 1, in the rows to test on. All other columns are inputs, as real numbers.

        >>> homes = {"owner": ["a", "b", "a"], "area": [50, 70, 65], "price": [1.5, 2.5, 2.0]}
        >>> Federated.from_table(homes, client="owner", targets="price")
        Federated('table', Clients(2 clients, 3 examples), 0 test examples)
        """
        if not files.is_table(table) and not hasattr(table, "__arrow_c_stream__"):
            raise DataError(
                "the table must be a data frame, an Arrow table or a mapping of columns; got "
                f"{type(table).__name__}",
                hint="read a file first, for example with pandas.read_csv(…)",
            )
        columns = files.table(table)
        outputs = (targets,) if isinstance(targets, str) else tuple(targets)
        others = (client, *outputs, *(() if split is None else (split,)))
        for column in others:
            if column not in columns.column_names:
                raise DataError(
                    f"the table has no column {column!r}; it has {', '.join(columns.column_names)}"
                )
            if columns.column(column).null_count:
                raise DataError(f"column {column!r} of the table must have a value in every row")
        rest = [column for column in columns.column_names if column not in others]
        if not rest:
            raise DataError("the table must have columns of inputs beside the others; it has none")
        held_out = np.zeros(len(columns), dtype=np.bool_)
        if split is not None:
            held_out = _held_out(columns, split)
        numbers = [_real_numbers(columns, column) for column in rest]
        answers = [_real_numbers(columns, column) for column in outputs]
        inputs, goals = _pair(
            "the table",
            (
                np.column_stack([*numbers, np.zeros((len(columns), 0))]),
                answers[0] if isinstance(targets, str) else np.column_stack(answers),
            ),
        )
        owner = columns.column(client).combine_chunks().dictionary_encode().indices.to_numpy()
        clients, number = np.unique(owner[~held_out], return_inverse=True)
        return _by_row(
            inputs, goals, ~held_out, held_out, number, len(clients),
            name=name, public_test=public_test,
        )  # fmt: skip

    @property
    def has_private_test(self) -> bool:
        """Whether exact figures on the test examples may reveal clients' data."""
        return not self.public_test and self.test_targets.shape[0] > 0

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What a privacy statement about a model of these data must leave out."""
        notes = [] if self.public_symbols else [SYMBOLS_OF_CLIENTS]
        return (*notes, TESTED_ON_CLIENTS) if self.has_private_test else tuple(notes)

    def __repr__(self) -> str:  # never an example
        tests = self.test_targets.shape[0]
        return f"Federated({self.name!r}, {self.train!r}, {tests} test examples)"

    def to(self, device: torch.device | str) -> Federated:
        return replace(
            self,
            train=self.train.to(device),
            test_inputs=self.test_inputs.to(device),
            test_targets=self.test_targets.to(device),
        )


def group_by_client(inputs: Tensor, targets: Tensor, client: Tensor, clients: int) -> Clients:
    """Group examples by `client`, the number of each one's client; a client may have none."""
    order = torch.argsort(client, stable=True)
    sizes = torch.bincount(client, minlength=clients)
    offsets = torch.zeros(clients + 1, dtype=torch.int64)
    offsets[1:] = sizes.cumsum(0)
    return Clients(inputs=inputs[order], targets=targets[order], offsets=offsets)


def _by_row(
    inputs: Tensor,
    targets: Tensor,
    train: Bool,
    test: Bool,
    client: I64,
    clients: int,
    **about: Any,
) -> Federated:
    """Examples of which some are for training, and others for tests; `client` is the number of the
    client of each training example."""
    rows, held_out = torch.from_numpy(train), torch.from_numpy(test)
    return Federated(
        train=group_by_client(inputs[rows], targets[rows], torch.from_numpy(client), clients),
        test_inputs=inputs[held_out],
        test_targets=targets[held_out],
        **about,
    )


def femnist(path: Path | str) -> Federated:
    """F-EMNIST by writer: each full writer's training images; ink 1 on paper 0, (28, 28).

    Tested on all test images, including those of writers who are not clients. The file is an .npz
    with `images`, `labels`, `writer`, `split` (1 = test) and `writer_full`.
    """
    parts = _npz(path, ("images", "labels", "writer", "split", "writer_full"))
    examples = len(parts["images"])
    for name in ("labels", "writer", "split"):
        _same_length(path, name, parts[name], examples)
    images = _ink(255 - parts["images"].astype(np.uint8))
    labels = torch.from_numpy(parts["labels"].astype(np.int64))
    writer = parts["writer"].astype(np.int64)
    full = parts["writer_full"].astype(bool)
    if examples and int(writer.max()) >= len(full):
        raise DataError(f"{path} names writer {writer.max()} and describes {len(full)}")
    test = parts["split"] == 1
    train = ~test & full[writer]
    number = np.cumsum(full) - 1  # full writers are clients 0, 1, 2, …
    return _by_row(
        images, labels, train, test, number[writer[train]], int(full.sum()), name="femnist"
    )


def mnist(
    folder: Path | str,
    *,
    writers: Path | str | None = None,
    clients: int | None = None,
    examples: int | None = None,
    seed: int = 0,
) -> Federated:
    """MNIST by writer, or at random: `clients` with `examples` each, without repetition.

    `folder` has the four idx files, gzipped; `writers` is an .npz with `train_writer`, the writer
    of each training image. Paper 003's sets are 10 clients of 200 and 6,000 of 10.
    """
    if (writers is None) == (clients is None) or (clients is None) != (examples is None):
        raise SpecError("MNIST is split by writers, or into clients and examples each; give one")
    images, labels = _mnist_part(folder, "mnist-train")
    if writers is not None:
        writer = _npz(writers, ("train_writer",))["train_writer"].astype(np.int64)
        _same_length(writers, "train_writer", writer, len(labels))
        names, client = np.unique(writer, return_inverse=True)
        train = group_by_client(images, labels, torch.from_numpy(client), len(names))
    else:
        assert clients is not None  # checked above
        assert examples is not None  # checked above
        require(clients >= 1 and examples >= 1, "clients and examples must be at least 1")
        if clients * examples > len(labels):
            raise DataError(
                f"{clients} clients of {examples} need {clients * examples} examples;"
                f" there are {len(labels)}"
            )
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=generator)[: clients * examples]
        offsets = torch.arange(clients + 1) * examples
        train = Clients(inputs=images[order], targets=labels[order], offsets=offsets)
    test_images, test_labels = _mnist_part(folder, "mnist-t10k")
    return Federated(
        train=train,
        test_inputs=test_images,
        test_targets=test_labels,
        name="mnist",
        public_test=True,  # a separate file: no client holds any of it
    )


def shakespeare(path: Path | str, *, length: int = 80) -> Federated:
    """Speaking roles, each predicting its next character.

    A role's lines are joined by newlines, put between BEGIN and END and cut into sequences of
    `length`; the last is padded. Training uses the lines of split 0, testing those of split 1.
    The file is Parquet with `client`, `split` and `line`. There are `SYMBOLS` = 90 symbols.
    """
    require.at_least(1, length=length)
    table = _parquet(path, ("client", "split"), "line")
    client, split = _numbers(table, "client"), _numbers(table, "split")
    codes = np.full(0x110000, UNKNOWN, dtype=np.int64)
    codes[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS)) + UNKNOWN + 1
    roles, number = np.unique(client, return_inverse=True)
    lines: list[list[list[str]]] = [[[] for _ in roles] for _ in range(2)]
    for role, part, line in zip(
        number.tolist(), split.tolist(), table.column("line").to_pylist(), strict=True
    ):
        lines[part][role].append(line)
    parts = []
    for of_roles in lines:
        pieces = [np.empty((0, length + 1), dtype=np.int64)]
        owners = [np.empty(0, dtype=np.int64)]
        for role, role_lines in enumerate(of_roles):
            if role_lines:
                text = np.frombuffer("\n".join(role_lines).encode("utf-32-le"), dtype=np.uint32)
                cut = _cut(np.concatenate(([BEGIN], codes[text], [END])), length)
                pieces.append(cut)
                owners.append(np.full(len(cut), role, dtype=np.int64))
        rows, owner = torch.from_numpy(np.concatenate(pieces)), np.concatenate(owners)
        parts.append((*_next(rows), torch.from_numpy(owner)))
    (inputs, targets, owner_of), (test_inputs, test_targets, _) = parts
    return Federated(
        train=group_by_client(inputs, targets, owner_of, len(roles)),
        test_inputs=test_inputs,
        test_targets=test_targets,
        name="shakespeare",
    )


def commits(
    path: Path | str, *, vocabulary: int = 10_000, length: int = 20, most: int = 256
) -> Federated:
    """Users' sentences, each predicting its next word.

    A sentence is put between BEGIN and END and cut after `length` words to predict; a user has its
    first `most`. Words are numbered by their frequency in the training sentences, from
    UNKNOWN + 1; all beyond the `vocabulary` most frequent are UNKNOWN. So there are at most
    vocabulary + 4 symbols. The vocabulary is counted in the clear: it is not a private release.
    The file is Parquet with `user`, `split` (1 = test) and `text`, words separated by single
    spaces.
    """
    require.at_least(1, vocabulary=vocabulary, length=length, most=most)
    table = _parquet(path, ("user", "split"), "text")
    import pyarrow.compute as pc

    user, split = _numbers(table, "user"), _numbers(table, "split")
    words = pc.split_pattern(table.column("text").combine_chunks(), " ")
    sizes = pc.list_value_length(words).to_numpy(zero_copy_only=False).astype(np.int64)
    encoded = pc.dictionary_encode(pc.list_flatten(words))
    word = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    names = np.array(encoded.dictionary.to_pylist(), dtype=object)
    in_training = np.repeat(split == 0, sizes)
    uses = np.bincount(word[in_training], minlength=len(names))
    ranked = np.array(sorted(range(len(names)), key=lambda each: (-uses[each], names[each])))
    ranked = ranked[:vocabulary][uses[ranked[:vocabulary]] > 0].astype(np.int64)
    symbol = np.full(len(names), UNKNOWN, dtype=np.int64)
    symbol[ranked] = np.arange(len(ranked)) + UNKNOWN + 1

    sentences = np.full((len(sizes), length + 1), PAD, dtype=np.int64)
    place = np.arange(len(word)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1  # after BEGIN
    row = np.repeat(np.arange(len(sizes)), sizes)
    fits = place <= length
    sentences[row[fits], place[fits]] = symbol[word[fits]]
    sentences[:, 0] = BEGIN
    ends = np.flatnonzero(sizes + 1 <= length)
    sentences[ends, sizes[ends] + 1] = END
    inputs, targets = _next(torch.from_numpy(sentences))

    users, number = np.unique(user, return_inverse=True)
    first = np.lexsort((np.arange(len(number)), split, number))  # by user, then part, then order
    rank = np.empty(len(number), dtype=np.int64)
    group = number[first] * 2 + split[first]
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    rank[first] = np.arange(len(number)) - np.repeat(starts, np.diff(starts, append=len(number)))
    train = (split == 0) & (rank < most)
    return _by_row(
        inputs, targets, train, split == 1, number[train], len(users),
        name="commits", public_symbols=False,
    )  # fmt: skip


def load(path: Path | str) -> Federated:
    """Your own data: an .npz with `inputs`, `targets`, `client` and, optionally, `split`.

    `inputs` is (examples, …): floating-point numbers, or whole numbers ≥ 0 that stand for symbols.
    `targets` is (examples,) or (examples, time), classes from 0 and −1 for none, or floating-point
    numbers of any shape, for a module and a loss of your own. `client` has the number of each
    example's client, any whole numbers, and `split` is 0 to train and 1 to test; without it there
    are no test examples. Clients are renumbered in the order of these numbers.
    """
    parts = _npz(path, ("inputs", "targets", "client"), ("split",))
    examples = len(parts["inputs"])
    for name, part in parts.items():
        _same_length(path, name, part, examples)
        if name in ("client", "split") and part.dtype.kind not in "iu":
            raise DataError(f"{name} of {path} must be whole numbers; got {part.dtype}")
    if examples == 0:
        raise DataError(f"{path} has no examples")
    for name in ("client", "split"):
        if name in parts and parts[name].ndim != 1:
            raise DataError(f"{name} of {path} must be one number per example")
    targets = _targets(path, parts["targets"])
    split = parts.get("split", np.zeros(examples, dtype=np.int64))
    if not np.isin(split, (0, 1)).all():
        raise DataError(f"split of {path} must be 0 (train) or 1 (test) everywhere")
    inputs = _inputs(path, parts["inputs"])
    train = split == 0
    clients, number = np.unique(parts["client"][train], return_inverse=True)
    return _by_row(inputs, targets, train, split == 1, number, len(clients), name=Path(path).stem)


def read(kind: str, path: Path) -> Federated:
    """Read data of a kind: your own ("examples"), or one of the papers' data sets."""
    readers: dict[str, Callable[[Path], Federated]] = {
        "examples": load,
        "femnist": femnist,
        "mnist": lambda folder: mnist(folder, writers=folder / "mnist_writers.npz"),
        "shakespeare": shakespeare,
        "commits": commits,
    }
    if kind not in readers:
        raise SpecError(f"a kind of data must be one of {', '.join(readers)}; got {kind!r}")
    return readers[kind](path)


def save(path: Path | str, federated: Federated) -> None:
    """Write the .npz that `load` reads; clients without examples are lost."""
    train = federated.train
    client = torch.repeat_interleave(torch.arange(len(train)), train.sizes)
    tests = federated.test_targets.shape[0]
    np.savez_compressed(
        path,
        inputs=torch.cat([train.inputs, federated.test_inputs]).cpu().numpy(),
        targets=torch.cat([train.targets, federated.test_targets]).cpu().numpy(),
        client=torch.cat([client, torch.zeros(tests, dtype=torch.int64)]).numpy(),
        split=np.repeat([0, 1], [len(client), tests]),
    )


def _pair(place: str, part: Examples) -> tuple[Tensor, Tensor]:
    """A client's inputs and targets as tensors."""
    try:
        inputs, targets = map(_array, part)
    except (TypeError, ValueError) as problem:
        raise DataError(f"{place} must be a pair, inputs and targets: {problem}") from problem
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise DataError(
            f"{place} must have as many targets as inputs; got shapes {inputs.shape} and "
            f"{targets.shape}"
        )
    return _inputs(place, inputs), _targets(place, targets)


def _array(values: Any) -> npt.NDArray[np.generic]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    return np.asarray(values)


def _targets(path: Path | str, values: npt.NDArray[np.generic]) -> Tensor:
    if values.dtype.kind == "f":
        return _finite(f"targets of {path}", values)
    if values.dtype.kind not in "iub":
        raise DataError(f"targets of {path} must be numbers; got {values.dtype}")
    return torch.from_numpy(values.astype(np.int64))


def _finite(what: str, values: npt.NDArray[np.generic]) -> Tensor:
    bad = np.flatnonzero(~np.isfinite(values).all(axis=tuple(range(1, values.ndim))))
    if bad.size:
        raise DataError(f"{what} must be finite; example {bad[0]} and {bad.size - 1} more are not")
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if not np.isfinite(single).all():
        raise DataError(f"{what} must fit in 32 bits: below 3.4e38 in size")
    return torch.from_numpy(single)


def _inputs(path: Path | str, values: npt.NDArray[np.generic]) -> Tensor:
    if values.dtype.kind == "f":
        return _finite(f"inputs of {path}", values)
    if values.dtype.kind not in "iu":
        raise DataError(f"inputs of {path} must be numbers; got {values.dtype}")
    symbols = torch.from_numpy(values.astype(np.int64))
    if int(symbols.min() if symbols.numel() else 0) < 0:
        raise DataError(f"symbols in inputs of {path} must be at least 0")
    return symbols


def _ink(images: npt.NDArray[np.generic]) -> Tensor:
    """Bytes as numbers from 0 to 1."""
    return torch.from_numpy(images.astype(np.float32) / np.float32(255))


def _cut(symbols: I64, length: int) -> I64:
    """Rows of length + 1 symbols; the last of a row is the first of the next; PAD at the end."""
    rows = max(1, -(-(len(symbols) - 1) // length))
    padded = np.full(rows * length + 1, PAD, dtype=np.int64)
    padded[: len(symbols)] = symbols
    cut: I64 = padded[np.arange(rows)[:, None] * length + np.arange(length + 1)]
    return cut


def _next(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each symbol and the one after it; PAD is never a target."""
    targets = rows[:, 1:].clone()
    return rows[:, :-1].clone(), targets.masked_fill_(targets == PAD, IGNORED)


def _mnist_part(folder: Path | str, part: str) -> tuple[Tensor, Tensor]:
    images = _idx(Path(folder) / _MNIST.format(part=part, kind="images-idx3"), "images")
    labels = _idx(Path(folder) / _MNIST.format(part=part, kind="labels-idx1"), "labels")
    if len(images) != 784 * len(labels):
        raise DataError(f"{part} in {folder} must have a label for each image of 28 × 28")
    return _ink(images.reshape(-1, 28, 28)), torch.from_numpy(labels.astype(np.int64))


def _idx(path: Path, kind: str) -> U8:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as problem:
        raise DataError(f"{path} cannot be read as gzipped idx: {problem}") from problem
    header, magic = _MNIST_BYTES[kind]
    if int.from_bytes(content[:4], "big") != magic:
        raise DataError(f"{path} must be an idx file of {kind}, which starts with {magic}")
    return np.frombuffer(content, dtype=np.uint8, offset=header)


def _npz(
    path: Path | str, names: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Mapping[str, npt.NDArray[np.generic]]:
    if not Path(path).exists():
        raise DataError(f"there is no file {path}")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{path} must be an .npz with {', '.join(names)}")
        with file:
            has = ", ".join(file.files)
            missing = [name for name in names if name not in file.files]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}; it has {has}")
            parts = {name: file[name] for name in (*names, *optional) if name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as problem:
        raise DataError(f"{path} cannot be read as .npz without pickles: {problem}") from problem
    for name, part in parts.items():
        if part.ndim == 0:
            raise DataError(f"{name} of {path} must be an array with one entry per example")
    return parts


def _same_length(path: Path | str, name: str, part: npt.NDArray[np.generic], examples: int) -> None:
    if len(part) != examples:
        raise DataError(
            f"{name} of {path} must have {examples} entries, one per example; got {part.shape}"
        )


def _parquet(path: Path | str, numbers: tuple[str, ...], text: str) -> pa.Table:
    """Columns of whole numbers and one of text, with a value in every row."""
    import pyarrow as pa
    import pyarrow.parquet

    if not Path(path).is_file():
        raise DataError(f"there is no file {path}")
    try:
        has = pa.parquet.read_schema(path).names
        missing = [name for name in (*numbers, text) if name not in has]
        if missing:
            raise DataError(f"{path} has no column {', '.join(missing)}; it has {', '.join(has)}")
        table = pa.parquet.read_table(path, columns=[*numbers, text])
        kinds = [
            pa.int64() if name in numbers else pa.large_string() for name in table.schema.names
        ]
        table = table.cast(pa.schema(zip(table.schema.names, kinds, strict=True)))
    except (pa.ArrowException, OSError) as problem:
        raise DataError(f"{path} cannot be read as Parquet: {problem}") from problem
    for name in table.schema.names:
        if table.column(name).null_count:
            raise DataError(f"column {name!r} of {path} must have a value in every row")
    if not np.isin(table.column("split").to_numpy(), (0, 1)).all():
        raise DataError(f"column 'split' of {path} must be 0 (train) or 1 (test) everywhere")
    return table


def _real_numbers(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """The values of a column, which must be finite numbers."""
    values: npt.NDArray[Any] = table.column(name).to_numpy()
    if values.dtype.kind not in "iufb":
        raise DataError(
            f"column {name!r} of the table must be numbers; got {table.column(name).type}",
            hint="leave the column out, or give each of its values a number",
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise DataError(
            f"column {name!r} of the table must be finite; row {bad[0]} (counted from 0) and "
            f"{bad.size - 1} more are not",
            hint="leave out these rows, or give them a value",
        )
    return values


def _held_out(table: pa.Table, name: str) -> Bool:
    """The rows to test on, some but not all, by a column of true and false or of 1 and 0."""
    values = table.column(name).to_numpy()
    is_number = values.dtype.kind in "biu"
    wrong = values[~np.isin(values, (0, 1))] if is_number else values
    if wrong.size:
        raise DataError(
            f"column {name!r} of the table must be true or 1 in the rows to test on, and false or "
            f"0 in the others; got {wrong[0] if is_number else table.column(name).type}",
            hint=f'make it so first, for example frame[{name!r}] = frame[{name!r}] == "test"',
        )
    held_out: Bool = values == 1
    if held_out.all() or not held_out.any():
        part = "test" if held_out.any() else "train"
        raise DataError(
            f"column {name!r} of the table must have rows to test on (true or 1) and rows to train "
            f"on (false or 0); all {len(values):,} rows are to {part} on",
            hint="leave out split if there is nothing to test on" if part == "train" else None,
        )
    return held_out


def _numbers(table: pa.Table, name: str) -> I64:
    numbers: I64 = table.column(name).to_numpy()
    return numbers
