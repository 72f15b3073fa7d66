from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.errors import SpecError
from sfumato.flow.model_terms import LocalTraining
from sfumato.learn import clients as learning
from sfumato.learn import gradients, models
from sfumato.learn.clients import Updates, updates
from sfumato.learn.data import Clients

SIZES = (5, 0, 13, 1, 8, 20, 4, 9)
COHORT = (6, 2, 0, 1, 5, 3)
NAMES = ("softmax", "mlp", "cnn", "char_lstm", "word_lstm", "other")
TRAININGS = {
    "epochs": LocalTraining(learning_rate=0.1, batch=4, epochs=2),
    "one step": LocalTraining(learning_rate=0.1, batch=4, steps=1),
    "steps": LocalTraining(learning_rate=0.1, batch=4, steps=4),
    "few examples": LocalTraining(learning_rate=0.1, batch=4, epochs=2, most_examples=6),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side; threads of each would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model_of(name: str) -> nn.Module:
    if name == "other":  # no engine of its own: one client after another
        return own_model(nn.Flatten(), nn.Linear(784, 5), nn.Tanh(), nn.Linear(5, 10))
    sizes: dict[str, int] = {"classes": 10}
    if name.endswith("lstm"):
        sizes = {"inputs": 12, "classes": 12, "hidden": 6}
    elif name != "softmax":
        sizes["hidden"] = 9
    return models.make(name, seed=2, **sizes).double()


def own_model(*layers: nn.Module) -> nn.Module:
    """A custom model, its parameters drawn from a seed."""
    model = nn.Sequential(*layers).double()
    flat = torch.randn(models.count(model), dtype=torch.float64, generator=generator(2))
    models.assign(model, 0.05 * flat)
    return model


def population(name: str, sizes: tuple[int, ...] = SIZES) -> Clients:
    draw, count = generator(7), sum(sizes)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    if name.endswith("lstm"):
        targets = torch.randint(-1, 12, (count, 7), generator=draw)  # −1: not to be predicted
        return Clients(torch.randint(0, 12, (count, 7), generator=draw), targets, offsets)
    images = torch.randn(count, 28, 28, dtype=torch.float64, generator=draw)
    return Clients(images, torch.randint(0, 10, (count,), generator=draw), offsets)


def combine(parts: Iterator[Updates], parameters: int, count: int) -> Updates:
    """All updates, in the order of the cohort; each client must appear exactly once."""
    whole = Updates(
        members=torch.arange(count),
        deltas=torch.full((count, parameters), float("nan"), dtype=torch.float64),
        examples=torch.full((count,), -1),
        loss=torch.full((count,), float("nan"), dtype=torch.float64),
        sound=torch.zeros(count, dtype=torch.bool),
    )
    members = []
    for part in parts:
        members += part.members.tolist()
        for name in ("deltas", "examples", "loss", "sound"):
            getattr(whole, name)[part.members] = getattr(part, name).to(getattr(whole, name).dtype)
    assert sorted(members) == list(range(count))
    return whole


def train(name: str, training: LocalTraining, **options: Any) -> Updates:
    model = model_of(name)
    flat = models.flatten(model)
    parts = updates(
        model, flat, population(name), COHORT, training, generator=generator(), **options
    )
    return combine(parts, len(flat), len(COHORT))


def visits(name: str, training: LocalTraining, seed: int = 1) -> list[list[Tensor]]:
    """The batches of every client of the cohort, as scheduled."""
    model, clients = model_of(name), population(name)
    flat = models.flatten(model)
    schedule = learning.make_schedule(model, flat, clients, COHORT, training, generator(seed))
    result = []
    for client in range(len(COHORT)):
        batches = schedule.batches(torch.tensor([client]))
        result.append(
            [
                batches.examples[step, 0][batches.valid[step, 0]]
                for step in range(len(batches.active))
            ]
        )
    return result


def alone(name: str, training: LocalTraining) -> tuple[Tensor, Tensor]:
    """A plain loop, client after client, through torch's own optimiser."""
    clients, deltas, losses = population(name), [], []
    for batches in visits(name, training):
        model = model_of(name)
        before = models.flatten(model)
        optimiser = torch.optim.SGD(model.parameters(), lr=training.learning_rate)
        total, count = 0.0, 0
        for batch in batches:
            logits, targets = model(clients.inputs[batch]).flatten(0, -2), clients.targets[batch]
            loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=-1)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            optimiser.step()
            targets_counted = int((targets >= 0).sum())
            total, count = total + float(loss.detach()) * targets_counted, count + targets_counted
        deltas.append(models.flatten(model) - before)
        losses.append(total / max(count, 1))
    return torch.stack(deltas), torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_computes_what_a_plain_loop_computes(name: str, training: LocalTraining) -> None:
    """In double precision: 1e-12 is rounding, and far below any error of a formula."""
    deltas, losses = alone(name, training)
    together = train(name, training)
    assert torch.linalg.vector_norm(deltas) > 1e-3
    torch.testing.assert_close(together.deltas, deltas, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(together.loss, losses, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_single_precision_agrees_to_a_hundred_thousandth(name: str) -> None:
    """Rates at which parameters move more than rounding does, and do not diverge."""
    rate = 0.5 if name.endswith("lstm") else 0.1
    training = LocalTraining(learning_rate=rate, batch=4, epochs=2)
    exact = train(name, training).deltas
    model, examples = model_of(name).float(), population(name)
    flat = models.flatten(model)
    assert flat.dtype == torch.float32
    parts = updates(model, flat, examples, COHORT, training, generator=generator())
    single = combine(parts, len(flat), len(COHORT)).deltas
    assert torch.linalg.vector_norm(single - exact) < 1e-5 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS.keys())
def test_results_do_not_depend_on_the_chunk(name: str, training: LocalTraining) -> None:
    one, many = train(name, training, chunk=1), train(name, training, chunk=7)
    for part in ("deltas", "loss"):
        torch.testing.assert_close(getattr(one, part), getattr(many, part), rtol=1e-10, atol=1e-14)
    assert torch.equal(one.examples, many.examples)


def test_patches_give_the_gradients_of_the_convolution() -> None:
    """The engine for a GPU, here on the CPU, against the module itself."""
    model = model_of("cnn")
    batched = gradients.Batched(model, gradients.convolutional(list(model.children())))
    draw = generator(3)
    inputs = torch.randn(3, 4, 28, 28, dtype=torch.float64, generator=draw)
    targets = torch.randint(-1, 10, (3, 4), generator=draw)
    flat = models.flatten(model)
    states = flat + 0.01 * torch.randn(3, len(flat), dtype=torch.float64, generator=draw)
    for first in (True, False):
        into = torch.zeros_like(states) if first else states.clone()
        parameters = gradients.views(model, states if first else into)
        places = gradients.views(model, into)
        sums, counts = batched.step(parameters, places, (inputs, targets), 0.1, first)
        for client in range(3):
            models.assign(model, states[client])
            model.zero_grad()
            loss = gradients.cross_entropy(model(inputs[client]), targets[client])
            torch.autograd.backward(loss)
            step = -0.1 * torch.cat([value.grad.reshape(-1) for value in model.parameters()])  # type: ignore[union-attr]  # all have one
            reached = step if first else states[client] + step
            torch.testing.assert_close(into[client], reached, rtol=1e-11, atol=1e-14)
            count = int((targets[client] >= 0).sum())
            assert float(sums[client]) == pytest.approx(float(loss.detach()) * count, rel=1e-12)
            assert int(counts[client]) == count


def test_the_fused_memory_has_the_gradient_of_its_function() -> None:
    """Finite differences, by torch's own check."""
    draw = generator(5)
    entering = torch.randn(2, 4, 3, 8, dtype=torch.float64, generator=draw, requires_grad=True)
    recurrent = torch.randn(2, 2, 8, dtype=torch.float64, generator=draw, requires_grad=True)
    assert torch.autograd.gradcheck(gradients.recurrent_outputs, (entering, recurrent))


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("softmax", gradients.Linear),
        ("mlp", gradients.Linear),
        ("cnn", type(None)),
        ("char_lstm", gradients.Batched),
        ("other", type(None)),
    ],
)
def test_models_go_to_their_engines(name: str, engine: type) -> None:
    model = model_of(name)
    assert type(gradients.engine_of(model, torch.device("cpu"))) is engine
    on_gpu = gradients.engine_of(model, torch.device("cuda"))
    assert type(on_gpu) is (gradients.Batched if name == "cnn" else engine)
    next(model.parameters()).requires_grad_(False)
    assert gradients.engine_of(model, torch.device("cuda")) is None


def test_an_epoch_visits_every_example_once_in_an_order_of_its_own() -> None:
    training = LocalTraining(learning_rate=0.1, batch=4, epochs=3)
    clients = population("softmax")
    for client, batches in zip(COHORT, visits("softmax", training), strict=True):
        own = list(range(int(clients.offsets[client]), int(clients.offsets[client + 1])))
        examples = torch.cat(batches).tolist() if batches else []
        epochs = [
            examples[start : start + len(own)] for start in range(0, 3 * len(own), len(own) or 1)
        ]
        assert [sorted(epoch) for epoch in epochs] == ([own] * 3 if own else [])
        if len(own) > 8:  # equal orders by chance: once in 9! at most
            assert len({tuple(epoch) for epoch in (own, *epochs)}) == 4
        assert {len(batch) for batch in batches} <= {4, len(own) % 4}


def test_the_generator_decides_on_every_epoch() -> None:
    """How the second epoch's order follows from the first's: equal by chance once in 20!."""
    training = LocalTraining(learning_rate=0.1, batch=4, epochs=2)
    changes = []
    for seed in (1, 2):
        examples = torch.cat(visits("softmax", training, seed)[COHORT.index(5)]).tolist()
        first, second = examples[:20], examples[20:]
        changes.append([first.index(example) for example in second])
    assert changes[0] != changes[1]


def test_steps_go_on_into_another_epoch() -> None:
    training = LocalTraining(learning_rate=0.1, batch=4, steps=5)
    lengths = [[len(batch) for batch in batches] for batches in visits("softmax", training)]
    assert lengths == [
        [4, 4, 4, 4, 4],
        [4, 4, 4, 1, 4],
        [4, 1, 4, 1, 4],
        [],
        [4, 4, 4, 4, 4],
        [1, 1, 1, 1, 1],
    ]


def test_most_examples_are_the_same_in_all_epochs_of_a_round() -> None:
    training = LocalTraining(learning_rate=0.1, batch=4, epochs=2, most_examples=6)
    for client, batches in zip(COHORT, visits("softmax", training), strict=True):
        examples = torch.cat(batches).tolist() if batches else []
        half = len(examples) // 2
        assert half == min(6, SIZES[client])
        assert sorted(examples[:half]) == sorted(examples[half:])
        assert len(set(examples)) == half


def is_even(counts: Tensor, rounds: int) -> bool:
    return bool((counts / rounds - 0.25).abs().max() < 0.055)


def test_examples_are_drawn_evenly() -> None:
    """Each of 20 is in a batch of 5 in a quarter of 4,000 rounds. False alarm: 40·exp(−24.2), below
    2e-9 (Hoeffding). Power: a share of 0.33 is missed with probability below 1e-2 (the same).
    """
    rounds, draw = 4_000, generator(11)
    clients = Clients(torch.zeros(20, 1), torch.zeros(20, dtype=torch.int64), torch.tensor([0, 20]))
    model = nn.Linear(1, 2)
    training = LocalTraining(learning_rate=0.1, batch=5, steps=1)
    counts = torch.zeros(20)
    for _ in range(rounds // 100):
        schedule = learning.make_schedule(
            model, models.flatten(model), clients, [0] * 100, training, draw
        )
        batches = schedule.batches(torch.arange(100))
        counts += torch.bincount(batches.examples[0].reshape(-1), minlength=20)
    assert counts.sum() == 5 * rounds
    assert is_even(counts, rounds)


def test_an_uneven_draw_would_be_noticed() -> None:
    """The negative control: one example in a third of the rounds."""
    draws = torch.rand(4_000, 20, generator=generator(12)) < torch.tensor([1 / 3, *[0.25] * 19])
    assert not is_even(draws.sum(dim=0), 4_000)


def test_a_generator_moves_on_and_decides() -> None:
    model, examples, draw = model_of("mlp"), population("mlp"), generator()
    flat, training = models.flatten(model), TRAININGS["epochs"]

    def round() -> Tensor:
        parts = updates(model, flat, examples, COHORT, training, generator=draw)
        return combine(parts, len(flat), len(COHORT)).deltas

    first, second = round(), round()
    assert not torch.equal(first, second)
    draw.manual_seed(1)
    assert torch.equal(round(), first)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_without_examples_changes_nothing(name: str) -> None:
    whole = train(name, TRAININGS["epochs"])
    empty = COHORT.index(1)
    assert torch.equal(whole.deltas[empty], torch.zeros_like(whole.deltas[empty]))
    assert (int(whole.examples[empty]), float(whole.loss[empty])) == (0, 0.0)
    assert bool(whole.sound.all())


def test_examples_count_what_was_used() -> None:
    counts = {name: train("softmax", each).examples.tolist() for name, each in TRAININGS.items()}
    assert counts == {
        "epochs": [4, 13, 5, 0, 20, 1],
        "one step": [4, 4, 4, 0, 4, 1],
        "steps": [4, 13, 5, 0, 16, 1],
        "few examples": [4, 6, 5, 0, 6, 1],
    }


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn", "other"])
@pytest.mark.parametrize("training", [TRAININGS["epochs"], TRAININGS["one step"]])
def test_one_broken_client_is_reported_and_harms_no_other(
    name: str, broken: float, training: LocalTraining
) -> None:
    model, examples = model_of(name), population(name)
    flat = models.flatten(model)
    inputs = examples.inputs.clone()
    inputs[examples.offsets[2] : examples.offsets[3]] = broken
    bad = COHORT.index(2)
    fine = torch.arange(len(COHORT)) != bad

    def run(examples: Clients) -> Updates:
        parts = updates(model, flat, examples, COHORT, training, generator=generator())
        return combine(parts, len(flat), len(COHORT))

    whole, reference = run(Clients(inputs, examples.targets, examples.offsets)), run(examples)
    assert torch.equal(whole.sound, fine)
    torch.testing.assert_close(whole.deltas[fine], reference.deltas[fine], rtol=1e-12, atol=1e-15)


def test_training_that_diverges_is_not_sound() -> None:
    training = LocalTraining(learning_rate=1e200, batch=4, epochs=3)
    assert train("mlp", training).sound.tolist() == [client == 1 for client in COHORT]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", TRAININGS)
def test_training_runs_on_another_device_and_never_waits_for_it(name: str, kind: str) -> None:
    """Meta tensors have no values: reading one, or mixing devices, is an error."""
    model, examples = model_of(name).to("meta"), population(name).to("meta")
    flat = torch.empty(models.count(model), dtype=torch.float64, device="meta")
    (part,) = updates(model, flat, examples, COHORT, TRAININGS[kind], generator=generator())
    assert part.members.device.type == "cpu"
    for each in (part.deltas, part.examples, part.loss, part.sound):
        assert each.device.type == "meta"


def test_parameters_and_examples_are_not_changed() -> None:
    for name in NAMES:
        model, examples = model_of(name), population(name)
        flat = models.flatten(model)
        parts = updates(model, flat, examples, COHORT, TRAININGS["epochs"], generator=generator())
        assert len(list(parts)) == 1
        again = population(name)
        assert torch.equal(flat, models.flatten(model_of(name)))
        assert torch.equal(models.flatten(model), flat)
        assert torch.equal(examples.inputs, again.inputs)
        assert torch.equal(examples.targets, again.targets)


def test_frozen_parameters_stay() -> None:
    """Only the last layer is trained: a softmax model of the first layer's outputs."""
    first, last = nn.Sequential(nn.Flatten(), nn.Linear(784, 6)), nn.Linear(6, 10)
    model = own_model(*first, nn.ReLU(), last)
    first.requires_grad_(False)
    examples, training = population("mlp"), TRAININGS["epochs"]
    flat = models.flatten(model)
    assert len(flat) == 70
    features = Clients(first(examples.inputs).relu(), examples.targets, examples.offsets)
    whole, reference = (
        combine(updates(each, flat, data, COHORT, training, generator=generator()), 70, 6)
        for each, data in ((model, examples), (nn.Sequential(last), features))
    )
    assert torch.linalg.vector_norm(reference.deltas) > 1e-3
    torch.testing.assert_close(whole.deltas, reference.deltas, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"most_examples": 0}, "most_examples must be at least 1"),
        ({"epochs": 2, "steps": 3}, "for epochs or for steps"),
    ],
)
def test_a_training_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        LocalTraining(**{"learning_rate": 0.1, "batch": 4, **changed})


def test_wrong_arguments_are_refused_before_any_training() -> None:
    model, examples, training = model_of("mlp"), population("mlp"), TRAININGS["epochs"]
    flat = models.flatten(model)
    for cohort in ([8], [-1]):
        with pytest.raises(SpecError, match="clients of a cohort must be 0 to 7"):
            updates(model, flat, examples, cohort, training, generator=generator())
    with pytest.raises(SpecError, match="parameters must be"):
        updates(model, flat[:-1], examples, COHORT, training, generator=generator())
    with pytest.raises(SpecError, match="chunk must be at least 1"):
        updates(model, flat, examples, COHORT, training, generator=generator(), chunk=0)
    elsewhere = examples.to("meta")
    with pytest.raises(SpecError, match=r"must be where the parameters are, cpu; call clients.to"):
        updates(model, flat, elsewhere, COHORT, training, generator=generator())


def test_an_empty_cohort_gives_nothing() -> None:
    model, examples, training = model_of("mlp"), population("mlp"), TRAININGS["epochs"]
    flat = models.flatten(model)
    assert list(updates(model, flat, examples, [], training, generator=generator())) == []


def test_a_model_that_does_not_fit_its_clients_is_refused() -> None:
    examples = population("mlp")
    learning.check_fit(model_of("mlp"), examples)
    with pytest.raises(SpecError, match="has 9 classes; a target is 9"):
        learning.check_fit(models.make("mlp", classes=9, seed=1).double(), examples)
    with pytest.raises(SpecError, match=r"does not take inputs of shape \(28, 28\)"):
        learning.check_fit(models.make("mlp", inputs=9, seed=1).double(), examples)
    with pytest.raises(SpecError, match="must give classes for targets"):
        learning.check_fit(nn.Linear(28, 10).double(), examples)
    small = models.make("char_lstm", inputs=5, classes=12, hidden=4, seed=1)
    sequences = population("char_lstm")
    symbols = torch.zeros_like(sequences.inputs)
    symbols[-1, 0] = 11
    with pytest.raises(SpecError, match="knows 5 symbols; an input is 11"):
        learning.check_fit(small, Clients(symbols, sequences.targets, sequences.offsets))


def test_updates_do_not_print() -> None:
    (part,) = updates(
        model_of("mlp"),
        models.flatten(model_of("mlp")),
        population("mlp"),
        COHORT,
        TRAININGS["one step"],
        generator=generator(),
    )
    assert repr(part) == "Updates(of 6 clients)"
