"""Sfumato in a Flower app: real messages, mods and strategies, with and without processes.

Needs flwr, so it runs in the environment that `scripts/integrations` creates:

    .venv-flower-app/bin/python -m pytest tests/service/test_flower.py
    .venv-flower-app/bin/python -m pytest tests/service/test_flower.py -m slow

The slow test starts a SuperLink and SuperNodes on loopback; the others use a grid that calls the
ClientApp itself.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not in this environment")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp import strategy as strategies

from sfumato.errors import MismatchError, SpecError
from sfumato.flow.aggregation import Plain
from sfumato.flow.contribute import report
from sfumato.integrations.flower import KEY, SketchedStrategy, secure_mod, sfumato_mod
from sfumato.integrations.rounds import VERSION, Layout, UpdateDesign
from sfumato.privacy import AdditiveLoss, SeededRng, SystemRng, epsilon_of
from sfumato.privacy.accounting import SampledLoss

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 300
Change = Callable[[int, Message], Message | None]


@pytest.fixture(autouse=True)
def identity(monkeypatch: Any) -> None:
    """The sender of messages, which Flower sets in a ServerApp."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class HandGrid(Grid):  # type: ignore[misc]  # flwr is not there for mypy
    """Calls the ClientApp of each node when its message is pushed; `change` may alter an answer, or
    lose it by returning None."""

    def __init__(self, app: ClientApp, nodes: int, change: Change | None = None) -> None:
        self.app, self.change = app, change
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
            for node in range(1, nodes + 1)
        }
        self.answers: dict[str, Message] = {}
        self.steps: list[str] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            name, node = str(uuid.uuid4()), message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = name
            names.append(name)
            request = message.content.get(KEY, {})
            self.steps.append(str(request.get("step")))
            try:
                answer = self.app(copy.deepcopy(message), self.contexts[node])
            except Exception:  # noqa: S112  # like a failing node: the server gets no answer
                continue
            # In a real node, Flower sets this.
            answer.metadata.__dict__["_src_node_id"] = node
            changed = answer if self.change is None else self.change(node, answer)
            if changed is not None:
                self.answers[name] = changed
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answers.pop(name) for name in list(message_ids) if name in self.answers]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def model() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "weight": np.linspace(-1, 1, LENGTH - 10, dtype=np.float32).reshape(29, 10),
        "bias": np.zeros(10, dtype=np.float32),
        "seen": np.array(3),
    }


def change_of(node: int) -> np.ndarray[Any, Any]:
    """The update of client `node`: norms from 0.5 to 0.9, no two alike."""
    values = np.random.default_rng(node).standard_normal(LENGTH)
    return np.asarray(values * (0.5 + 0.4 * (node % 5) / 5) / np.linalg.norm(values))


def app_of(mod: Any, train: Callable[[dict[str, Any], int], dict[str, Any]] | None = None) -> Any:
    app = ClientApp(mods=[mod])

    @app.train()  # type: ignore[untyped-decorator]  # flwr is not there for mypy
    def answer(message: Message, context: Context) -> Message:
        assert KEY not in message.content  # the app does not see our record
        before = {name: each.numpy() for name, each in message.content["arrays"].items()}
        if train is not None:
            after = train(before, context.node_id)
        else:
            after = Layout.of(before).apply(before, change_of(context.node_id))
        content = RecordDict(
            {
                "arrays": ArrayRecord({name: Array(each) for name, each in after.items()}),
                "metrics": MetricRecord({"num-examples": 100 * context.node_id, "secret": 4.5}),
            }
        )
        return Message(content, reply_to=message)

    return app


def arrays_of(model: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(each) for name, each in model.items()})


def strategy_of(design: UpdateDesign, inner: Any = None, **more: Any) -> SketchedStrategy:
    inner = inner or strategies.FedAvg(fraction_evaluate=0.0, min_available_nodes=1)
    more = {"delta": 1e-5, "step_seconds": 0.5, "rng": SeededRng(5), **more}
    return SketchedStrategy(inner, design, **more)


def mean_of(nodes: Iterable[int]) -> np.ndarray[Any, Any]:
    return np.asarray(np.mean([change_of(node) for node in nodes], axis=0))


def one_round(
    strategy: SketchedStrategy, grid: HandGrid, number: int = 1
) -> tuple[np.ndarray[Any, Any] | None, Any]:
    """The mean update of a round, or None, and its metrics."""
    start = model()
    messages = list(strategy.configure_train(number, arrays_of(start), ConfigRecord(), grid))
    replies = grid.send_and_receive(messages)
    new, metrics = strategy.aggregate_train(number, replies)
    assert new is not None  # or the run would end without a model
    after = {name: each.numpy() for name, each in new.items()}
    if metrics is None:  # the round was left out
        assert all(np.array_equal(after[name], each) for name, each in start.items())
        return None, None
    assert after["seen"] == 3
    return Layout.of(start).difference(after, start), metrics


def rounding_of(design: UpdateDesign, nodes: int) -> float:
    """The largest error of a whole, unnoised mean in a coordinate: rounding moves each client by at
    most one whole number; float32 arrays of size 1 by 1e-6 each way."""
    return 1 / design.sketch(LENGTH, nodes, 1).scale + 4e-6


@pytest.mark.parametrize("secure", [False, True])
def test_the_mean_of_whole_updates_is_exact_up_to_rounding(secure: bool) -> None:
    design = UpdateDesign(clip=1.0, secure=secure, seed=1)
    grid = HandGrid(app_of(sfumato_mod), 6)
    update, metrics = one_round(strategy_of(design), grid)
    assert update is not None
    assert np.abs(update - mean_of(range(1, 7))).max() <= rounding_of(design, 6)
    assert metrics["clients"] == 6
    assert metrics["epsilon"] == math.inf
    expected = ["hello", "enrol", "share", "mask", "unmask"] if secure else ["train"]
    assert grid.steps == [step for step in expected for _ in range(6)]


def test_a_masked_sum_of_sketches_is_the_plain_one_up_to_rounding() -> None:
    """Both decode sums of the same clipped sketches, each rounded by one whole number at most, so a
    cell of the mean differs by 2/scale at most, and a decoded coordinate by √rows times that."""
    results = []
    for secure in (False, True):
        design = UpdateDesign(clip=1.0, rate=4, rows=5, secure=secure, seed=3)
        update, _ = one_round(strategy_of(design), HandGrid(app_of(sfumato_mod), 6))
        assert update is not None
        results.append(update)
    sketch = design.sketch(LENGTH, 6, 1)
    assert np.abs(results[0] - results[1]).max() <= 2 * math.sqrt(5) / sketch.scale + 1e-5
    other = UpdateDesign(clip=1.0, rate=4, rows=5, seed=4)  # the negative control
    update, _ = one_round(strategy_of(other), HandGrid(app_of(sfumato_mod), 6))
    assert update is not None
    assert np.abs(results[0] - update).max() > 10 * math.sqrt(5) / sketch.scale


@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_the_deviation_that_is_accounted_for(secure: bool) -> None:
    """False alarm 1e-6: of 300 coordinates with noise of deviation s, the sum of squares is s²·χ²
    with 300 degrees, which is within these quantiles; a deviation that is half or twice as large
    is outside."""
    from scipy import stats

    design = UpdateDesign(clip=1.0, noise_multiplier=2.0, secure=secure, dropout=0.2, seed=1)
    strategy = strategy_of(design)
    update, metrics = one_round(strategy, HandGrid(app_of(sfumato_mod), 10))
    assert update is not None
    update_round = design.round(Layout.of(model()), 10, 1)
    deviation = update_round.task.mechanism.stddev(10) / update_round.sketch.scale / 10
    squares = float(np.square((update - mean_of(range(1, 11))) / deviation).sum())
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], LENGTH)
    assert low < squares < high
    assert not low < 4 * squares < high
    assert not low < squares / 4 < high
    assert metrics["epsilon"] == pytest.approx(
        epsilon_of([update_round.task.loss], 1e-5), rel=1e-12
    )


def test_epsilon_adds_up_and_a_spent_budget_stops_the_rounds() -> None:
    design = UpdateDesign(clip=1.0, noise_multiplier=2.0, seed=1)
    one = epsilon_of([design.round(Layout.of(model()), 4, 1).task.loss], 1e-5)
    two = epsilon_of([design.round(Layout.of(model()), 4, 1).task.loss] * 2, 1e-5)
    strategy = strategy_of(design, most_epsilon=two)
    grid = HandGrid(app_of(sfumato_mod), 4)
    spent = [one_round(strategy, grid, number)[1]["epsilon"] for number in (1, 2)]
    assert spent == pytest.approx([one, two], rel=1e-12)
    messages = len(grid.steps)
    assert one_round(strategy, grid, 3) == (None, None)
    assert len(grid.steps) == messages  # no client got a message
    assert strategy.spending.epsilon == pytest.approx(two, rel=1e-12)


def test_random_cohorts_are_accounted_for_as_such() -> None:
    """Three of thirty clients per round, five times."""
    spent = {}
    for sampling in ("all", "fixed"):
        design = UpdateDesign(clip=1.0, noise_multiplier=2.0, sampling=sampling, seed=1)
        inner = strategies.FedAvg(fraction_train=0.1, fraction_evaluate=0.0, min_train_nodes=3)
        strategy = strategy_of(design, inner)
        grid = HandGrid(app_of(sfumato_mod), 30)
        for number in range(1, 6):
            one_round(strategy, grid, number)
        assert len(grid.steps) == 15
        spent[sampling] = strategy.spending.epsilon
    loss = design.round(Layout.of(model()), 3, 1).task.loss
    assert isinstance(loss, AdditiveLoss)
    sampled = SampledLoss(loss=loss, probability=0.1, scheme="fixed", times=5)
    assert spent["fixed"] == pytest.approx(epsilon_of([sampled], 1e-5), rel=1e-12)
    assert spent["all"] == pytest.approx(epsilon_of([loss] * 5, 1e-5), rel=1e-12)
    assert spent["fixed"] < spent["all"]


@pytest.mark.parametrize("secure", [False, True])
def test_long_updates_are_clipped(secure: bool) -> None:
    design = UpdateDesign(clip=0.25, secure=secure, seed=1)
    update, _ = one_round(strategy_of(design), HandGrid(app_of(sfumato_mod), 5))
    assert update is not None
    expected = np.mean(
        [0.25 * change_of(node) / np.linalg.norm(change_of(node)) for node in range(1, 6)], axis=0
    )
    assert np.abs(update - expected).max() <= rounding_of(design, 5)


@pytest.mark.parametrize("secure", [False, True])
def test_a_client_whose_update_is_not_finite_sends_zeros_and_cannot_be_recognised(
    secure: bool,
) -> None:
    def train(before: dict[str, Any], node: int) -> dict[str, Any]:
        update = change_of(node)
        update[7] = math.nan if node == 2 else update[7]
        return Layout.of(before).apply(before, update)

    strategy = strategy_of(UpdateDesign(clip=1.0, secure=secure, seed=1))
    update, metrics = one_round(strategy, HandGrid(app_of(sfumato_mod, train), 6))
    assert not strategy.refused
    assert metrics["clients"] == 6
    assert update is not None
    left = mean_of(node for node in range(1, 7) if node != 2) * 5 / 6
    assert np.abs(update - left).max() <= rounding_of(strategy.design, 6)


def test_a_client_that_answers_with_other_shapes_is_left_out_by_name() -> None:
    def train(before: dict[str, Any], node: int) -> dict[str, Any]:
        if node == 2:
            return {**before, "bias": np.zeros(11, dtype=np.float32)}
        return before

    strategy = strategy_of(UpdateDesign(clip=1.0, seed=1))
    assert one_round(strategy, HandGrid(app_of(sfumato_mod, train), 4))[1]["clients"] == 3
    assert strategy.refused == {"shape": 1}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("version", "version", VERSION - 1),
        ("version", "version", VERSION + 1),
        ("seed", "seed", [9, 1]),
        ("seed", "seed", [1, 8]),
        ("shape", "layout", "0" * 64),
        ("round", "round", "0" * 64),
        ("malformed", "table", b"short"),
        ("malformed", "table", 5),
    ],
)
def test_an_answer_that_does_not_belong_is_refused_by_name(
    name: str, field: str, value: Any
) -> None:
    def change(node: int, answer: Message) -> Message:
        if node == 3:
            answer.content[KEY][field] = value
        return answer

    strategy = strategy_of(UpdateDesign(clip=1.0, rate=3, seed=1))
    grid = HandGrid(app_of(sfumato_mod), 5, change)
    assert one_round(strategy, grid)[1]["clients"] == 4
    assert strategy.refused == {name: 1}


def test_a_table_that_is_too_long_is_refused() -> None:
    design = UpdateDesign(clip=1.0, seed=1)
    update_round = design.round(Layout.of(model()), 5, 1)
    huge = np.full(update_round.sketch.cells, update_round.sketch.rounding.largest, dtype=np.int64)
    assert isinstance(update_round.task.aggregation, Plain)
    sealed = update_round.task.aggregation.seal(huge)

    def change(node: int, answer: Message) -> Message:
        if node == 3:
            answer.content[KEY]["table"] = sealed
        return answer

    strategy = strategy_of(design)
    assert one_round(strategy, HandGrid(app_of(sfumato_mod), 5, change))[1]["clients"] == 4
    assert strategy.refused == {"malformed": 1}


@pytest.mark.parametrize("secure", [False, True])
def test_a_client_of_another_version_says_so(secure: bool, monkeypatch: Any) -> None:
    strategy = strategy_of(UpdateDesign(clip=1.0, secure=secure, seed=1))
    grid = HandGrid(app_of(sfumato_mod), 5)
    push = grid.push_messages

    def push_newer(messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.dst_node_id == 2:
                message.content[KEY]["version"] = VERSION + 1  # like that of a newer client
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", push_newer)
    assert one_round(strategy, grid)[1]["clients"] == 4
    assert strategy.refused == {"version": 1}


def test_a_client_without_the_mod_is_absent() -> None:
    def through(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_id != 2:
            return sfumato_mod(message, context, call_next)
        del message.content[KEY]
        return call_next(message, context)

    strategy = strategy_of(UpdateDesign(clip=1.0, seed=1))
    assert one_round(strategy, HandGrid(app_of(through), 4))[1]["clients"] == 3
    assert strategy.refused == {"absent": 1}


def test_the_mod_sends_nothing_else_and_refuses_servers_that_ask_for_arrays() -> None:
    answers = []

    def change(node: int, answer: Message) -> Message:
        answers.append(answer)
        return answer

    grid = HandGrid(app_of(sfumato_mod), 3, change)
    one_round(strategy_of(UpdateDesign(clip=1.0, seed=1)), grid)
    for answer in answers:
        assert list(answer.content) == [KEY]
        names = {"version", "table", "round", "layout", "seed"}
        assert set(answer.content[KEY]) == names
    plain = strategies.FedAvg(fraction_evaluate=0.0)
    messages = plain.configure_train(1, arrays_of(model()), ConfigRecord(), grid)
    with pytest.raises(MismatchError, match="SketchedStrategy"):
        grid.app(next(iter(messages)), grid.contexts[1])


def test_a_client_can_insist_on_masks() -> None:
    strategy = strategy_of(UpdateDesign(clip=1.0, seed=1))
    assert one_round(strategy, HandGrid(app_of(secure_mod), 4)) == (None, None)
    assert strategy.refused == {"protocol": 4}
    strategy = strategy_of(UpdateDesign(clip=1.0, secure=True, seed=1))
    assert one_round(strategy, HandGrid(app_of(secure_mod), 4))[1]["clients"] == 4


@pytest.mark.parametrize("step", ["hello", "enrol", "share", "mask", "unmask"])
def test_a_client_that_vanishes_in_any_step_is_missing_and_nothing_else(step: str) -> None:
    """The sum is of those that masked, including clients that vanish later."""
    drop = drop_from(step, {2})
    design = UpdateDesign(clip=1.0, secure=True, dropout=0.35, seed=1)
    strategy = strategy_of(design)
    grid = HandGrid(app_of(sfumato_mod), 6, drop)
    drop.grid = grid
    update, metrics = one_round(strategy, grid)
    left = [node for node in range(1, 7) if node != 2 or step == "unmask"]
    assert update is not None
    assert metrics["clients"] == len(left)
    assert np.abs(update - mean_of(left)).max() <= rounding_of(design, 6)


@pytest.mark.parametrize("step", ["hello", "enrol", "share", "mask", "unmask"])
def test_when_too_many_vanish_the_round_is_left_out_and_the_next_one_runs(step: str) -> None:
    drop = drop_from(step, {2, 3, 4, 5})
    design = UpdateDesign(clip=1.0, noise_multiplier=1.0, secure=True, dropout=0.35, seed=1)
    strategy = strategy_of(design)
    grid = HandGrid(app_of(sfumato_mod), 6, drop)
    drop.grid = grid
    assert one_round(strategy, grid) == (None, None)
    charged = 1 if step == "unmask" else 0  # the sum was about to be opened
    assert strategy.spending.rounds == charged
    grid.change = None
    update, metrics = one_round(strategy, grid, 2)
    assert update is not None
    assert metrics["clients"] == 6
    assert strategy.spending.rounds == charged + 1


def drop_from(step: str, nodes: set[int]) -> Any:
    """A change that loses the answers of these nodes from this step on."""
    order = ["hello", "enrol", "share", "mask", "unmask"]

    def change(node: int, answer: Message) -> Message | None:
        now = change.grid.steps[-1]  # type: ignore[attr-defined]  # set by the caller
        return None if node in nodes and order.index(now) >= order.index(step) else answer

    return change


def test_a_masked_table_reveals_nothing_and_rounds_have_different_masks() -> None:
    """False alarm 1e-6: cells of a masked table are uniform, so the mean of 300 of them, as shares
    of the modulus, is within 4.9 deviations of a half. Bare tables are far outside: their cells are
    residues next to 0 and to the modulus, and few lie between."""
    tables: list[bytes] = []

    def change(node: int, answer: Message) -> Message:
        if "table" in answer.content[KEY] and node == 1:
            tables.append(answer.content[KEY]["table"])
        return answer

    design = UpdateDesign(clip=1.0, secure=True, seed=1)
    strategy = strategy_of(design)
    grid = HandGrid(app_of(sfumato_mod), 4, change)
    one_round(strategy, grid, 1)
    one_round(strategy, grid, 2)
    first, second = tables
    assert first != second
    bits = design.round(Layout.of(model()), 4, 1).task.aggregation.modulus_bits

    def middle(table: bytes) -> int:
        digits = np.unpackbits(np.frombuffer(table, dtype=np.uint8), bitorder="little")
        cells = digits[: LENGTH * bits].reshape(LENGTH, bits) @ (1 << np.arange(bits))
        shares = cells / 2**bits
        return int(((shares > 0.25) & (shares < 0.75)).sum())

    deviation = math.sqrt(LENGTH) / 2
    for table in tables:
        assert abs(middle(table) - LENGTH / 2) < 4.9 * deviation
    plain = UpdateDesign(clip=1.0, seed=1).round(Layout.of(model()), 4, 1)
    rng = SystemRng()
    text = report(plain.task, plain.values(change_of(1), rng=rng), rng=rng).message
    assert abs(bits - plain.task.aggregation.modulus_bits) == 0
    assert abs(middle(text) - LENGTH / 2) > 4.9 * deviation


def test_inner_strategies_of_means_work_as_usual() -> None:
    """FedAvgM with momentum moves by the mean update in its first round, FedAdam by about its rate
    in every coordinate."""
    design = UpdateDesign(clip=1.0, seed=1)
    inner = strategies.FedAvgM(fraction_evaluate=0.0, server_momentum=0.9, server_learning_rate=1.0)
    update, _ = one_round(strategy_of(design, inner), HandGrid(app_of(sfumato_mod), 4))
    assert update is not None
    assert np.abs(update - mean_of(range(1, 5))).max() <= rounding_of(design, 4)


@pytest.mark.parametrize("kind", [strategies.FedMedian, strategies.Krum, strategies.FedTrimmedAvg])
def test_strategies_that_need_every_update_are_refused(kind: Any) -> None:
    with pytest.raises(SpecError, match="needs every client's arrays"):
        strategy_of(UpdateDesign(clip=1.0, seed=1), kind())
    with pytest.raises(SpecError, match="needs every client's arrays"):
        strategy_of(
            UpdateDesign(clip=1.0, seed=1),
            strategies.DifferentialPrivacyServerSideFixedClipping(strategies.FedAvg(), 1, 1, 2),
        )


def test_secrets_stay_on_the_client() -> None:
    """A client's keys are in no message that it sends."""
    answers: list[Message] = []

    def change(node: int, answer: Message) -> Message:
        answers.append(copy.deepcopy(answer))
        return answer

    grid = HandGrid(app_of(sfumato_mod), 4, change)
    one_round(strategy_of(UpdateDesign(clip=1.0, secure=True, seed=1)), grid)
    messages = b"".join(
        value
        for answer in answers
        for value in answer.content[KEY].values()
        if isinstance(value, bytes)
    )
    for context in grid.contexts.values():
        state = json.loads(context.state[KEY]["participant"])
        for name in ("identity", "box_key", "mask_key", "seed", "sharing_seed"):
            secret = bytes.fromhex(state[name])
            assert len(secret) == 32
            assert secret not in messages


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_runs_on_a_superlink_and_survives_a_node_that_is_killed(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "flower_quickstart" / "compare.py"),
            *("--nodes", "5", "--rounds", "3", "--only", "secure", "--kill"),
            *("--out", str(tmp_path / "out.json")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    output = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["secure"]
    clients = [each["clients"] for each in output["rounds"].values()]
    assert clients[0] == 5
    assert clients[-1] == 4  # one was killed, and the last round ran without it
