from __future__ import annotations

import pytest
import torch
from torch import nn

from sfumato.errors import SpecError
from sfumato.learn import models

COUNTS = {
    "softmax": 7_850,
    "mlp": 108_478,
    "cnn": 1_018_174,
    "char_lstm": 820_522,
    "word_lstm": 4_050_748,
}


@pytest.mark.parametrize("name", models.NAMES)
def test_a_model_has_as_many_parameters_as_in_its_paper(name: str) -> None:
    model = models.make(name, seed=1)
    assert models.count(model) == COUNTS[name]
    assert models.flatten(model).shape == (COUNTS[name],)


def test_the_cnn_has_the_layers_of_paper_002() -> None:
    shapes = [tuple(value.shape) for value in models.make("cnn", seed=1).parameters()]
    assert shapes[::2] == [(32, 1, 3, 3), (64, 32, 3, 3), (128, 7_744), (62, 128)]
    assert shapes[1::2] == [(32,), (64,), (128,), (62,)]


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
@pytest.mark.parametrize("shape", [(784,), (28, 28)])
def test_images_go_in_flat_or_square(name: str, shape: tuple[int, ...]) -> None:
    model = models.make(name, classes=7, seed=1)
    assert model(torch.zeros(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("name", ["char_lstm", "word_lstm"])
def test_sequences_give_classes_at_every_step(name: str) -> None:
    model = models.make(name, inputs=11, classes=12, hidden=5, seed=1)
    assert model(torch.zeros(3, 6, dtype=torch.int64)).shape == (3, 6, 12)


def test_a_layer_computes_what_torch_computes() -> None:
    """Against torch's own LSTM, whose gates are in the order input, forget, candidate, output."""
    layer = models.make("char_lstm", hidden=6, seed=3).double().get_submodule("layers.0")
    assert isinstance(layer, models.Layer)
    reference = nn.LSTM(8, 6, batch_first=True).double()

    def reorder(value: torch.Tensor) -> torch.Tensor:
        candidate, enter, keep, leave = value.chunk(4, dim=-1)
        return torch.cat([enter, keep, candidate, leave], dim=-1)

    with torch.no_grad():
        state = {
            "weight_ih_l0": reorder(layer.inputs).T,
            "weight_hh_l0": reorder(layer.recurrent).T,
            "bias_ih_l0": reorder(layer.bias),
            "bias_hh_l0": torch.zeros(24),
        }
        reference.load_state_dict(state)
        generator = torch.Generator().manual_seed(1)
        sequence = torch.randn(4, 9, 8, dtype=torch.float64, generator=generator)
        expected = reference(sequence)[0]
        assert torch.linalg.vector_norm(expected) > 0.1
        torch.testing.assert_close(layer(sequence), expected, rtol=1e-12, atol=1e-14)


def test_a_prediction_does_not_see_what_comes_after_it() -> None:
    model = models.make("char_lstm", hidden=8, seed=1)
    symbols = torch.randint(0, 90, (2, 10), generator=torch.Generator().manual_seed(1))
    changed = symbols.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 90
    before, after = model(symbols), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn", "char_lstm"])
def test_the_seed_and_nothing_else_gives_the_parameters(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = models.flatten(models.make(name, seed=5))
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is left alone
    torch.manual_seed(2)
    assert torch.equal(models.flatten(models.make(name, seed=5)), first)
    assert not torch.equal(models.flatten(models.make(name, seed=6)), first)


def test_parameters_start_as_stated() -> None:
    parameters = models.trainable(models.make("char_lstm", seed=1))
    assert parameters["embedding"].abs().max() <= 0.05
    recurrent = parameters["layers.1.recurrent"].detach()
    assert torch.allclose(recurrent @ recurrent.T, torch.eye(256), atol=1e-5)
    bias = parameters["layers.0.bias"].detach().view(4, 256)
    assert torch.equal(bias, torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None].expand(4, 256))
    weight = parameters["output.weight"].detach()
    largest = (6 / (256 + 90)) ** 0.5
    assert 0.99 * largest < weight.abs().max() <= largest
    assert torch.equal(parameters["output.bias"].detach(), torch.zeros(90))


def test_a_vector_goes_into_a_model_and_comes_back() -> None:
    model = models.make("mlp", hidden=4, seed=1)
    flat = torch.arange(models.count(model), dtype=torch.float32)
    assert not torch.equal(models.flatten(model), flat)
    models.assign(model, flat)
    assert torch.equal(models.flatten(model), flat)


def test_flatten_copies_and_unflatten_does_not() -> None:
    model = models.make("softmax", seed=1)
    flat = models.flatten(model)
    flat[0] += 1
    assert not torch.equal(models.flatten(model), flat)
    views = models.unflatten(model, flat)
    assert list(views) == ["1.weight", "1.bias"]
    views["1.bias"].fill_(7.0)
    assert torch.equal(flat[-10:], torch.full((10,), 7.0))


def test_views_keep_leading_dimensions() -> None:
    model = models.make("softmax", seed=1)
    views = models.unflatten(model, torch.zeros(3, 7_850))
    assert [tuple(view.shape) for view in views.values()] == [(3, 10, 784), (3, 10)]


def test_frozen_parameters_are_no_part_of_the_vector() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert models.count(model) == 6
    assert list(models.unflatten(model, torch.zeros(6))) == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("resnet", {}, "must be one of softmax, mlp, cnn, char_lstm, word_lstm; got 'resnet'"),
        ("mlp", {"inputs": 0}, "inputs must be at least 1"),
        ("mlp", {"classes": 1}, "classes must be at least 2"),
        ("mlp", {"hidden": 0}, "hidden must be at least 1"),
        ("softmax", {"hidden": 3}, "a softmax model has none"),
        ("cnn", {"inputs": 783}, "square images"),
        ("cnn", {"inputs": 36}, "side 8 or more"),
    ],
)
def test_a_model_that_cannot_be_is_refused(
    name: str, changed: dict[str, int], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        models.make(name, seed=1, **changed)


def test_a_vector_of_another_length_is_refused() -> None:
    model = models.make("softmax", seed=1)
    with pytest.raises(SpecError, match="has length 7850; got shape"):
        models.unflatten(model, torch.zeros(7_849))
    with pytest.raises(SpecError, match="at least one parameter"):
        models.flatten(nn.ReLU())
