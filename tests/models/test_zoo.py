"""The models that come with the library: sizes, names, and the same results wherever they are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from stagewright.errors import ModelError
from stagewright.models import MODELS, build_model, forward_flops, parameter_counts

SMALL: dict[str, dict[str, Any]] = {
    "alexnet": {"num_classes": 5, "image_size": 64},
    "alexnet-of": {"num_classes": 5, "image_size": 64},
    "vgg16": {"num_classes": 5, "image_size": 32},
    "resnet18": {"num_classes": 5, "image_size": 32},
    "resnet50": {"num_classes": 5, "image_size": 32},
    "gpt2-small-untied": {"num_blocks": 2, "width": 32, "num_heads": 2, "vocabulary": 50, "context": 8},
    "gpt-tiny": {},
    "tiny-cnn": {},
    "mlp": {},
}
HUGE = ("alexnet", "alexnet-of", "vgg16", "resnet50")
"""Models so large that they are cut everywhere at once, not once at each place."""


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("alexnet", 61_100_840),
        ("alexnet-of", 50_303_912),
        ("vgg16", 138_357_544),
        ("vgg16-bn", 138_365_992),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("gpt2-small", 124_439_808),
        ("gpt2-small-untied", 163_037_184),
    ],
)
def test_parameter_counts(name: str, count: int) -> None:
    layered = build_model(name, device="meta")
    assert sum(parameter_counts(layered)) == count


def test_layers_carry_the_names_people_use() -> None:
    fc = ("fc1", "fc2", "fc3", "loss")
    vgg = "conv1_1 conv1_2 conv2_1 conv2_2 conv3_1 conv3_2 conv3_3 conv4_1 conv4_2 conv4_3 conv5_1 conv5_2 conv5_3"
    blocks = tuple(f"layer{n}.{i}" for n, count in ((1, 3), (2, 4), (3, 6), (4, 3)) for i in range(count))
    assert _names("alexnet") == ("conv1", "conv2", "conv3", "conv4", "conv5", *fc)
    assert _names("alexnet-of") == _names("alexnet")
    assert _names("vgg16") == _names("vgg16-bn") == (*vgg.split(), *fc)
    assert _names("resnet50") == ("conv1", *blocks, "fc", "loss")
    assert _names("gpt2-small") == ("embed", *(f"block{i}" for i in range(12)), "head", "loss")


def _names(name: str) -> tuple[str, ...]:
    return build_model(name, device="meta").names


def test_parameters_are_named_as_in_torchvision() -> None:
    alexnet = build_model("alexnet", device="meta").model.state_dict()
    modules = [f"features.{i}" for i in (0, 3, 6, 8, 10)] + [f"classifier.{i}" for i in (1, 4, 6)]
    assert list(alexnet) == [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]

    bn = build_model("vgg16-bn", device="meta").model.state_dict()
    assert {"features.40.weight", "features.41.running_mean", "classifier.6.bias"} <= set(bn)

    resnet = build_model("resnet50", device="meta").model.state_dict()
    assert len(resnet) == 320
    assert resnet["layer2.0.conv2.weight"].shape == (128, 128, 3, 3)
    assert resnet["layer4.0.downsample.1.num_batches_tracked"].shape == ()
    assert resnet["fc.weight"].shape == (1000, 2048)


def test_resnet_is_version_1_5() -> None:
    block = build_model("resnet50", device="meta").model.get_submodule("layer2.0")
    strides = [block.get_submodule(name).stride for name in ("conv1", "conv2", "conv3")]
    assert strides == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(("name", "giga"), [("alexnet", 1.43), ("vgg16", 30.9), ("resnet50", 8.18)])
def test_forward_flops_of_one_image(name: str, giga: float) -> None:
    assert sum(forward_flops(build_model(name, device="meta"))) / 1e9 == pytest.approx(giga, rel=0.01)


def test_flops_of_a_layer_are_its_own() -> None:
    flops = dict(zip(_names("tiny-cnn"), forward_flops(build_model("tiny-cnn", device="meta"))))
    assert flops["conv1"] == 2 * 8 * 3 * 9 * 16 * 16
    assert flops["fc1"] == 2 * 256 * 128
    assert flops["fc2"] == 2 * 128 * 10
    assert flops["loss"] == 0


@pytest.mark.parametrize("name", SMALL)
def test_cutting_anywhere_changes_nothing(name: str, run_whole: Any, run_cut: Any) -> None:
    layered = build_model(name, **SMALL[name])
    assert layered.cuts() == tuple(range(1, layered.num_layers))
    inputs, targets = _batch(layered, 3)
    whole = run_whole(layered, lambda model: (model(*inputs),), layered.loss, targets)
    cuts = [layered.cuts()] if name in HUGE else [*((cut,) for cut in layered.cuts()), layered.cuts()]
    for chosen in cuts:
        assert not whole.differences(run_cut(layered, chosen, inputs, targets)), chosen


def _batch(layered: Any, rows: int) -> tuple[Any, Any]:
    torch.manual_seed(3)
    inputs = [_filled(spec, rows) for spec in layered.inputs]
    return inputs, [_filled(spec, rows) for spec in layered.targets]


def _filled(spec: Any, rows: int) -> torch.Tensor:
    shape = (rows, *spec.shape_per_row)
    return torch.randn(shape) if spec.dtype.is_floating_point else torch.randint(0, 5, shape)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = build_model("tiny-cnn"), build_model("tiny-cnn"), build_model("tiny-cnn", seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.model.conv1.weight, second.model.conv1.weight)
    assert not torch.equal(first.model.conv1.weight, other.model.conv1.weight)


def test_a_stage_recomputes_under_checkpoint() -> None:
    stage = build_model("gpt-tiny").stage(1, 4)
    received = torch.randn(2, 32, 64, requires_grad=True)
    plain, again = [], []
    for kept, run in ((plain, lambda x: stage(x)), (again, lambda x: checkpoint(stage, x, use_reentrant=False))):
        torch.manual_seed(1)
        received.grad = None
        run(received)[0].square().sum().backward()
        kept.append(received.grad)
    assert torch.equal(plain[0], again[0])


def test_a_tied_model_is_cut_as_one_that_is_not() -> None:
    layered = build_model("gpt2-small", num_blocks=2, width=32, num_heads=2, vocabulary=50, context=8)
    assert layered.tied == (("embed.token.weight", (0, 3)),)
    untied = build_model("gpt2-small", tied=False, num_blocks=2, width=32, num_heads=2, vocabulary=50, context=8)
    assert layered.cuts() == untied.cuts() == (1, 2, 3, 4)


def test_a_stage_of_the_loss_alone_returns_the_sum_over_rows_and_the_predictions() -> None:
    layered = build_model("tiny-cnn")
    stage = layered.stage(4, 5)
    logits, labels = torch.randn(3, 10, requires_grad=True), torch.tensor([1, 2, 3])
    loss, predictions = stage(logits, labels)
    assert loss.item() == pytest.approx(3 * torch.nn.functional.cross_entropy(logits, labels).item())
    assert torch.equal(predictions, logits)
    assert not predictions.requires_grad
    assert [spec.name for spec in stage.targets] == ["target"]


def test_unknown_names_and_options_are_refused_with_a_way_out() -> None:
    with pytest.raises(ModelError, match="did you mean resnet50"):
        build_model("resnet-50")
    with pytest.raises(ModelError, match="'gpt2-small' has no option 'image_size'"):
        build_model("gpt2-small", image_size=32, device="meta")
    with pytest.raises(ModelError, match="64 does not divide into 5 heads"):
        build_model("gpt-tiny", num_heads=5)


def test_every_model_says_what_it_is() -> None:
    assert all(entry.about for entry in MODELS.values())
