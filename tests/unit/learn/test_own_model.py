"""Modules of one's own: they train as in a plain loop, and no client adds more than the clip."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfumato import Federated, plan, train
from sfumato.collector.requests import Request
from sfumato.errors import DataError, SfumatoError, SpecError, StudyError
from sfumato.flow.model_terms import LocalTraining
from sfumato.learn import models
from sfumato.learn.clients import Updates, updates
from sfumato.learn.design import TrainingDesign, whole_numbers
from sfumato.learn.own_model import OwnModel
from sfumato.privacy import Budget, Ledger
from unit.learn.test_clients import COHORT, NAMES, combine, generator, model_of, population

CLIENTS, EXAMPLES = 12, 5
KEYS: dict[str, Any] = {
    "question": "train", "trust": "central", "epsilon": math.inf, "delta": 1e-3, "rounds": 1,
    "clip": 0.5, "compression": "none",
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "cohort": CLIENTS, "sampling": "fixed", "batch": EXAMPLES, "server": "sgd",
}  # fmt: skip


def study(**changes: Any) -> dict[str, Any]:
    training = changes.pop("training", {})
    return {**KEYS, **changes, "training": TRAINING | training}


class Line(nn.Module):
    """A linear function of three numbers, with layers on the way that no fast path knows."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(3, 4)
        self.middle = nn.Sequential(*layers)
        self.after = nn.Linear(4, 1)
        models.assign(self, 0.3 * torch.randn(models.count(self), generator=generator(5)))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.after(self.middle(self.before(inputs)))[:, 0]
        return result


def examples(change: Callable[[Tensor], None] | None = None, examples: int = EXAMPLES) -> Federated:
    """Clients with real targets; `change` alters the first one's inputs in place."""
    draw = generator(3)
    inputs = torch.randn(CLIENTS, EXAMPLES, 3, generator=draw)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5]) + 1
    if change is not None:
        change(inputs[0])
    pairs = list(zip(inputs, targets, strict=True))
    pairs[0] = (inputs[0, :examples], targets[0, :examples])
    test = torch.randn(60, 3, generator=draw)
    answers = test @ torch.tensor([1.0, -2.0, 0.5]) + 1
    return Federated.of(pairs, test=(test, answers), public_test=True)


# The slow path is right.


@pytest.mark.parametrize("name", [each for each in NAMES if each != "other"])
def test_the_slow_path_gives_the_clipped_updates_of_the_fast_path(name: str) -> None:
    """In double precision, where 1e-12 is rounding. Half of the clients are clipped. The control: a
    clip that is larger by a millionth is noticed."""
    model, clients = model_of(name), population(name)
    flat, local = models.flatten(model), LocalTraining(learning_rate=0.1, batch=4, epochs=2)
    own = OwnModel(model_of(name).float())

    def run(own: OwnModel | None) -> Updates:
        parts = updates(model, flat, clients, COHORT, local, generator=generator(), own=own)
        return combine(parts, len(flat), len(COHORT))

    fast, slow = run(None), run(own)
    assert torch.equal(fast.sound, slow.sound)
    clip = float(torch.linalg.vector_norm(fast.deltas, dim=1).median())

    def clipped(deltas: Tensor, clip: float) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(deltas, dim=1, keepdim=True)
        return deltas * (clip / norms).clamp(max=1.0).nan_to_num(nan=1.0)

    expected = clipped(fast.deltas, clip)
    torch.testing.assert_close(clipped(slow.deltas, clip), expected, rtol=1e-11, atol=1e-14)
    wrong = clipped(slow.deltas, clip * (1 + 1e-6))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, expected, rtol=1e-11, atol=1e-14)


def by_hand(
    module: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], data: Federated
) -> Tensor:
    """The update of every client, by a loop as PyTorch's documentation writes it, in double
    precision."""
    deltas, module = [], copy.deepcopy(module).double()
    for client in range(CLIENTS):
        model = copy.deepcopy(module)
        inputs, targets = (part.double() for part in data.train.examples(client))
        stepper = optimizer(model.parameters())
        for _ in range(3):
            stepper.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
            stepper.step()
        deltas.append(models.flatten(model) - models.flatten(module))
    return torch.stack(deltas)


def updates_of(
    own: OwnModel, data: Federated, local: LocalTraining | None = None, seed: int = 1
) -> Tensor:
    local = local or LocalTraining(learning_rate=0.05, batch=EXAMPLES, epochs=3)
    model = own.make().double()
    flat = models.flatten(model)
    parts = updates(
        model, flat, data.train, range(CLIENTS), local, generator=generator(seed), own=own
    )
    return combine(parts, len(flat), CLIENTS).deltas


@pytest.mark.parametrize(
    "optimizer",
    [None, partial(torch.optim.Adam, lr=0.01), partial(torch.optim.SGD, lr=0.05, momentum=0.9)],
    ids=["descent", "Adam", "momentum"],
)
def test_clients_train_as_in_a_loop_by_hand(
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
) -> None:
    """Every client begins with a new optimizer. Examples stand in another order, which changes sums
    by rounding; Adam divides that by its floor of 1e-8."""
    module, data = Line(nn.GroupNorm(2, 4), nn.GELU()), examples()
    expected = by_hand(module, optimizer or partial(torch.optim.SGD, lr=0.05), data)
    reached = updates_of(OwnModel(module, nn.MSELoss(), optimizer), data)
    assert torch.linalg.vector_norm(expected) > 0.1
    torch.testing.assert_close(reached, expected, rtol=1e-9, atol=1e-9)


def test_parameters_that_layers_share_count_once() -> None:
    module = Line(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module.middle[2].weight = module.middle[0].weight
    assert models.count(module) == 16 + 16 + 4 + 4 + 5
    expected = by_hand(module, partial(torch.optim.SGD, lr=0.05), examples())
    reached = updates_of(OwnModel(module, nn.MSELoss()), examples())
    torch.testing.assert_close(reached, expected, rtol=1e-9, atol=1e-12)


# No client adds more than the clip, or changes what others add.


class Exploding(Line):
    """Multiplies the outputs of examples with a large first number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return torch.where(inputs[:, 0] > 100, self.factor * outputs, outputs)


def poison(inputs: Tensor) -> None:
    inputs[:, 0] = 1000.0


FINE = {"noise_multiplier": 1e-4}  # so little noise makes rounding fine


def distance(module: nn.Module, **keys: Any) -> float:
    """How far the first client's examples move the trained model, through the public interface. The
    noise is the same with and without them."""
    ends = [
        train(study(training=FINE, **keys), data, model=module, loss=nn.MSELoss(), seed=1)
        for data in (examples(poison), examples(poison, examples=0))
    ]
    flats = [models.flatten(end.model) for end in ends]
    return float(torch.linalg.vector_norm(flats[0] - flats[1]))


def bound(module: nn.Module) -> float:
    """The claimed bound: the longest table of whole numbers, with the rounding of all clients."""
    keys = FINE | {"parameters": models.count(module)}
    design = plan(study(devices=CLIENTS, training=keys)).design
    assert isinstance(design, TrainingDesign)
    table = whole_numbers(design, design.length, None, design.clip)
    rounding = 2 * CLIENTS * math.sqrt(design.length) / table.scale
    assert rounding < 0.001 * design.clip
    return (table.rounding.l2 / table.scale + rounding) / CLIENTS


@pytest.mark.parametrize("factor", [1.0, 1e6, 1e15, 1e30, math.inf, math.nan])
def test_a_client_moves_a_model_by_no_more_than_the_clip(factor: float) -> None:
    module = Exploding(factor)
    assert distance(module) <= bound(module)


def test_a_client_reaches_the_clip_and_a_larger_clip_would_be_noticed() -> None:
    """The control of the test above: it measures what a wrong clip would change."""
    module = Exploding(1e6)
    assert distance(module) > 0.98 * bound(module)
    assert distance(module, clip=0.52) > bound(module)


class Remembering(Line):
    """Adds everything that it has seen to its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(float(inputs.mean()))
        return super().forward(inputs) + sum(self.seen)


class Shared(Remembering):
    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


@pytest.mark.parametrize("module", [Remembering(), Line(nn.Dropout(0.5))])
def test_no_client_changes_what_another_computes(module: nn.Module) -> None:
    """The first client's examples change, and everybody else's update stays, bit for bit."""
    own = OwnModel(module, nn.MSELoss())
    first, second = (updates_of(own, data) for data in (examples(), examples(poison)))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1:], second[1:])


def test_clients_that_share_a_module_would_be_noticed() -> None:
    """The control of the test above: a module that cannot be copied."""
    first, second = (
        updates_of(OwnModel(Shared(), nn.MSELoss()), data)
        for data in (examples(), examples(poison))
    )
    assert not torch.equal(first[1:], second[1:])


def test_layers_that_draw_get_other_numbers_for_every_client_and_round() -> None:
    inputs, targets = torch.ones(EXAMPLES, 3), torch.ones(EXAMPLES)
    data = Federated.of([(inputs, targets)] * CLIENTS)
    module, before = Line(nn.Dropout(0.5)), torch.get_rng_state()
    own = OwnModel(module, nn.MSELoss())
    deltas = updates_of(own, data)
    assert len(torch.unique(deltas, dim=0)) == CLIENTS
    assert torch.equal(updates_of(own, data), deltas)
    assert not torch.equal(updates_of(own, data, seed=2), deltas)
    fixed = updates_of(OwnModel(module.eval(), nn.MSELoss()), data)
    assert len(torch.unique(fixed, dim=0)) == 1
    assert torch.equal(torch.get_rng_state(), before)  # of the process


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))]
)
def test_layers_that_keep_statistics_are_refused_until_they_are_frozen(layer: nn.Module) -> None:
    module = Line(layer)
    with pytest.raises(SpecError, match="changes in training") as refused:
        train(study(), examples(), model=module, loss=nn.MSELoss())
    assert refused.value.hint is not None
    assert "GroupNorm" in refused.value.hint
    layer.eval()
    trained = train(study(), examples(), model=module, loss=nn.MSELoss())
    for name, value in module.named_buffers():
        assert torch.equal(trained.parameters[name], value)


# What comes back.


def test_a_regression_learns_and_the_module_comes_back() -> None:
    """Without noise, a linear target is found: the loss falls below a hundredth of its variance.
    Nothing of the module that was given changes, and the one that returns has seen no example."""
    module, before = Remembering(), models.flatten(Remembering())
    linear = Line(nn.Dropout(0.0))
    keys = {"rounds": 60, "clip": 5.0, "training": {"epochs": 3, "server": "momentum"}}
    trained = train(study(**keys), examples(), model=linear, loss=nn.MSELoss(), seed=1)
    assert isinstance(trained.model, Line)
    assert not trained.model.training
    assert trained.loss is not None
    assert trained.loss < 0.05
    assert trained.accuracy is None
    assert trained.to_dict()["accuracy"] is None
    assert trained.to_dict()["study"]["training"]["parameters"] == models.count(linear)
    assert repr(trained).startswith(f"TrainedModel: loss {trained.loss:.4g} after 60 rounds")
    torch.testing.assert_close(trained.model(torch.zeros(1, 3)), torch.ones(1), atol=0.5, rtol=0)
    other = train(study(), examples(), model=module, loss=nn.MSELoss(), seed=1)
    assert isinstance(other.model, Remembering)
    assert other.model.seen == module.seen == []
    assert torch.equal(models.flatten(module), before)
    assert not torch.equal(models.flatten(other.model), before)


@pytest.mark.parametrize(
    ("outputs", "loss", "targets", "accurate"),
    [
        (3, None, lambda values: values.argmax(dim=1), True),
        (3, nn.CrossEntropyLoss(label_smoothing=0.1), lambda values: values.argmax(dim=1), True),
        (2, nn.L1Loss(), lambda values: values[:, :2], False),
        (3, nn.BCEWithLogitsLoss(), lambda values: (values > 0).float(), False),
        (3, nn.PoissonNLLLoss(), lambda values: values.exp().round(), False),
    ],
    ids=["classes", "smoothed", "two numbers", "labels", "counts"],
)
def test_any_loss_and_any_targets(
    outputs: int, loss: Any, targets: Callable[[Tensor], Tensor], accurate: bool
) -> None:
    draw = generator(4)
    inputs = torch.randn(CLIENTS * EXAMPLES + 20, 3, generator=draw)
    answers = targets(inputs)
    pairs = [
        (inputs[start : start + EXAMPLES], answers[start : start + EXAMPLES])
        for start in range(0, CLIENTS * EXAMPLES, EXAMPLES)
    ]
    data = Federated.of(pairs, test=(inputs[-20:], answers[-20:]))
    module = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, outputs))
    models.assign(module, 0.3 * torch.randn(models.count(module), generator=draw))
    begin, end = (
        train(study(rounds=rounds), data, model=module, loss=loss, seed=1) for rounds in (1, 15)
    )
    assert begin.loss is not None
    assert end.loss is not None
    assert end.loss < begin.loss
    assert (end.accuracy is not None) == accurate


def test_without_test_examples_there_is_no_figure() -> None:
    data = examples()
    alone = Federated.of([data.train.examples(client) for client in range(CLIENTS)])
    trained = train(study(), alone, model=Line(), loss=nn.MSELoss())
    assert (trained.accuracy, trained.loss) == (None, None)
    assert repr(trained).startswith("TrainedModel: after 1 rounds")
    assert trained.privacy.not_covered == ()


@pytest.mark.parametrize("keys", [{}, {"trust": "secure", "dropout": 0.0}])
def test_the_promise_is_that_of_the_plan_and_says_what_it_assumes(keys: dict[str, Any]) -> None:
    keys = {"epsilon": 8.0, "rounds": 2, **keys}
    training = {"sampling": "passes", "cohort": 6}
    planned = plan(study(devices=CLIENTS, training={**training, "parameters": 21}, **keys))
    assert planned.predicted["model_parameters"] == 21
    assert planned.parameters["model"] == "a module of your own"
    books = Ledger(Budget(epsilon=8.0, delta=1e-3))
    trained = train(planned, examples(), model=Line(), loss=nn.MSELoss(), ledger=books)
    assert trained.privacy.epsilon == planned.privacy.epsilon == pytest.approx(books.spent())
    assert any("chosen without clients' data" in each for each in trained.privacy.assumptions)
    named = plan(study(devices=CLIENTS, training={**training, "model": "softmax"}, **keys))
    assert not any("the module" in each for each in named.privacy.assumptions)
    with pytest.raises(SpecError, match="of 21 parameters; it has 41"):
        train(planned, examples(), model=Line(nn.Linear(4, 4)), loss=nn.MSELoss())


def test_a_training_of_ones_own_module_is_resumed_with_the_same_module(tmp_path: Path) -> None:
    file, keys = tmp_path / "run.pt", study(rounds=4, epsilon=math.inf)
    own = partial(train, data=examples(), loss=nn.MSELoss(), seed=1)
    whole = own(keys, model=Line())
    books = Ledger(Budget(epsilon=None, delta=1e-3))
    resumed = partial(own, keys, ledger=books, checkpoint=file, resume=True)

    class InterruptionError(Exception):
        pass

    def dies(step: str, share: float) -> None:
        if step == "round 2":
            raise InterruptionError

    with pytest.raises(InterruptionError):
        resumed(model=Line(), progress=dies)
    other = Line()
    other.register_buffer("constant", torch.ones(1))
    with pytest.raises(DataError, match="must be of the same module"):
        resumed(model=other)
    assert torch.equal(models.flatten(resumed(model=Line()).model), models.flatten(whole.model))


def test_diffsketch_takes_a_module_of_ones_own() -> None:
    keys = study(algorithm="diffsketch", rows=5, width=8, clip=None, rounds=3) | {
        "compression": None,
        "training": {"cohort": CLIENTS, "mode": "none", "batch": EXAMPLES},
    }
    trained = train(keys, examples(), model=Line(), loss=nn.MSELoss(), seed=1)
    assert not torch.equal(models.flatten(trained.model), models.flatten(Line()))
    assert trained.accuracy is None


# What is refused.


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        ({"model": "softmax"}, {"model": Line()}, "names the model softmax"),
        ({"model": "softmax"}, {"loss": nn.MSELoss()}, "for a module of your own; got no model"),
        ({}, {}, "name a model, or have the number of parameters"),
        ({"parameters": 21}, {}, "exists in Python only"),
        ({"parameters": 21, "model": "mlp"}, {}, "leave it out, or training.model"),
        ({"inputs": 3}, {"model": Line()}, "leave out training.inputs"),
        ({}, {"model": Line().double(), "loss": nn.MSELoss()}, "must be float32"),
        ({}, {"model": nn.LazyLinear(1), "loss": nn.MSELoss()}, "weight has none before"),
        ({}, {"model": nn.Linear(2, 1), "loss": nn.MSELoss()}, r"inputs of shape \(3,\)"),
        ({}, {"model": nn.ReLU()}, "at least one parameter"),
        ({}, {"model": Line}, "must be a torch.nn.Module; got type"),
        ({}, {"model": Line()}, "targets must be whole numbers"),
        ({}, {"model": Line(), "loss": nn.MSELoss(reduction="none")}, "one number"),
        ({}, {"model": Line(), "loss": nn.NLLLoss()}, "the loss does not take outputs of shape"),
        (
            {"learning_rate": 0.5},
            {"model": Line(), "optimizer": torch.optim.Adam},
            "no effect on an optimizer",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    keys: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((SpecError, StudyError), match=message):
        train(study(training=keys), examples(), **options)


def test_data_of_another_kind_are_refused_with_what_would_work() -> None:
    with pytest.raises(DataError, match="must be a Federated; got list") as refused:
        train(study(), [([1.0], [0])], model=Line())  # type: ignore[arg-type]  # the mistake
    assert "Federated.of" in str(refused.value.hint)


def test_devices_and_collectors_have_no_code_for_it() -> None:
    keys = study(trust="secure", devices=CLIENTS, training={"parameters": 21, "sampling": None})
    request = Request(name="prices", purpose="To tell prices.", study=keys)
    with pytest.raises(StudyError, match="devices have no code for it"):
        request.parse_study()
    secure = study(trust="secure", dropout=0.0)
    with pytest.raises(SpecError, match="leave out protocol"):
        train(secure, examples(), model=Line(), loss=nn.MSELoss(), protocol=True)
    design = plan(study(devices=CLIENTS, training={"parameters": 21})).design
    assert isinstance(design, TrainingDesign)
    with pytest.raises(SpecError, match="devices have no code"):
        design.model_terms(bytes(84), 0)


# Files.


def test_a_file_of_onnx_asks_for_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train(study(), examples(), model=Line(), loss=nn.MSELoss())
    trained.save(tmp_path / "model.pt")
    again = Line()
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(models.flatten(again), models.flatten(trained.model))
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(SfumatoError, match="needs the package") as refused:
        trained.save(tmp_path / "model.onnx")
    assert refused.value.hint == 'pip install "sfumato[onnx]"'


@pytest.mark.slow
def test_a_model_as_onnx_computes_the_same_and_has_no_path(tmp_path: Path) -> None:
    """Any number of examples, by ONNX's own reference; up to float error."""
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    trained = train(study(), examples(), model=Line(nn.GELU()), loss=nn.MSELoss())
    file = tmp_path / "model.onnx"
    trained.save(file)
    onnx.checker.check_model(onnx.load(file))
    assert Path(__file__).name.encode() not in file.read_bytes()
    for count in (1, 2, 7):
        inputs = torch.randn(count, 3, generator=generator())
        (outputs,) = reference.ReferenceEvaluator(str(file)).run(None, {"inputs": inputs.numpy()})
        expected = trained.model(inputs).detach()
        torch.testing.assert_close(torch.tensor(outputs), expected, rtol=1e-5, atol=1e-6)


SCRIPT = """
import torch
from torch import Tensor, nn
import sfumato

def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()

data = sfumato.Federated.of({"ann": (torch.zeros(3, 3), [0.0, 1.0, 2.0])})
study = {"question": "train", "trust": "central", "epsilon": 8.0, "training": {"cohort": 2}}
result = sfumato.train(study, data, model=nn.Linear(3, 1), loss=loss, optimizer=torch.optim.Adam)
reveal_type(result)
reveal_type(result.model)
reveal_type(result.privacy.epsilon)
sfumato.train(study, [], model=nn.Linear(3, 1))
"""


@pytest.mark.slow
def test_a_users_script_has_precise_types(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    file = tmp_path / "script.py"
    file.write_text(SCRIPT, encoding="utf-8")
    lines = api.run(["--strict", "--config-file=", str(file)])[0].splitlines()
    types = [line.split("Revealed type is ")[1] for line in lines if "Revealed" in line]
    assert types == [
        '"sfumato.simulation.train.TrainedModel"', '"torch.nn.modules.module.Module"',
        '"float | None"',
    ]  # fmt: skip
    (mistake,) = [line for line in lines if ": error:" in line]
    assert 'Argument 2 to "train"' in mistake


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": torch.nn.Linear}, "must be a torch.nn.Module; got type"),
        ({"loss": "mse"}, "loss must be a function of outputs and targets; got str"),
        ({"optimizer": torch.optim.Adam([torch.zeros(1)])}, "function of the parameters; got Adam"),
    ],
    ids=["model", "loss", "optimizer"],
)
def test_a_class_or_an_instance_in_place_of_the_other_is_refused(
    wrong: dict[str, Any], says: str
) -> None:
    study = {"question": "train", "trust": "central", "epsilon": 8.0, "delta": 1e-5, "clip": 1.0}
    study |= {"rounds": 1, "training": {"cohort": 2}}
    data = Federated.of([([[0.5, 1.0]], [1]), ([[0.1, 0.2]], [0])])
    with pytest.raises(SpecError, match=says):
        train(study, data, **({"model": torch.nn.Linear(2, 2)} | wrong))


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss()])
def test_a_loss_that_compares_outputs_with_targets_of_other_examples_is_refused(
    loss: nn.Module,
) -> None:
    with pytest.raises(SpecError, match=r"the same shape .* outputs of shape \(1,\)") as problem:
        train(study(), examples(), model=nn.Linear(3, 1), loss=loss, seed=1)
    assert "outputs.squeeze(-1)" in str(problem.value.hint)
    assert "targets.unsqueeze(-1)" in str(problem.value.hint)


def test_a_loss_of_real_numbers_says_to_give_float_targets() -> None:
    pairs = [(torch.ones(2, 3), torch.tensor([0, 1]))] * CLIENTS
    loss = nn.BCEWithLogitsLoss()
    with pytest.raises(SpecError, match="does not take outputs") as problem:
        train(study(), Federated.of(pairs), model=Line(), loss=loss, seed=1)
    assert problem.value.hint == "give float targets, such as targets.float()"
    with pytest.raises(SpecError, match="does not take outputs") as problem:
        train(study(), Federated.of(pairs), model=Line(), loss=nn.NLLLoss(), seed=1)
    assert problem.value.hint is None
