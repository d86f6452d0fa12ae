"""Profiles from shapes alone: rooflines, bytes, and efficiencies fitted to measured figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stagewright.errors import ProfileError
from stagewright.memory import crossings
from stagewright.models import Layered, build_model, cross_entropy_sum, make_layered
from stagewright.profiling.analytic import (
    Measurement,
    calibrate_device,
    make_analytic_profile,
    operator_seconds,
    step_seconds,
)
from stagewright.profiling.facts import Work, find_facts, record_work
from stagewright.profiling.kinds import DeviceKind, find_kind
from stagewright.profiling.layers import make_pieces

ROUND = DeviceKind(
    name="round",
    memory_bytes=1 << 30,
    peak_flops={"fp32": 1e12, "fp16": 1e13},
    memory_bytes_per_s=1e9,
    efficiency={"conv": 0.5, "matmul": 1.0, "memory": 1.0},
)


def two_linears(width: int = 64, hidden: int = 256) -> Layered:
    model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    rows = torch.zeros(2, width), torch.zeros(2, dtype=torch.long)
    return make_layered(model, rows[:1], loss=cross_entropy_sum(), targets=rows[1:])


def test_an_operator_takes_what_its_work_or_its_bytes_take() -> None:
    assert operator_seconds(Work("matmul", 2e12, 1.0), ROUND, "fp32") == pytest.approx(2.0)
    assert operator_seconds(Work("conv", 2e12, 1.0), ROUND, "fp32") == pytest.approx(4.0)
    assert operator_seconds(Work("matmul", 1.0, 3e9), ROUND, "fp32") == pytest.approx(3.0)
    assert operator_seconds(Work("matmul", 2e12, 1.0), ROUND, "fp16") == pytest.approx(0.2)


def test_a_linear_layer_has_the_operations_and_bytes_of_its_matrix() -> None:
    """Forward of 64 → 256 is 2 · 64 · 256 operations a row; backward has the weights' gradient, but no input's."""
    pieces = make_pieces(two_linears())
    facts = find_facts(pieces)
    assert facts[0].flops == 2 * 64 * 256
    assert facts[0].parameter_bytes == 4 * (64 * 256 + 256)
    (first, *_), rows = record_work(pieces, 8), 8
    assert sum(work.flops for work in first.forward) == rows * 2 * 64 * 256
    assert sum(work.flops for work in first.backward) == rows * 2 * 64 * 256
    assert facts[0].weight_share == 1.0


def test_what_backward_needs_is_counted_once_and_without_the_weights() -> None:
    """Input 64 and activation 256 floats a row are kept; the second layer keeps its input, which the ReLU made."""
    profile = make_analytic_profile(two_linears(), ROUND, batch_sizes=(8,))
    kept = {layer.name: layer.saved_bytes for layer in profile.layers}
    assert sum(kept.values()) - kept["loss"] == 4 * (64 + 256)


def test_seconds_grow_with_rows_and_shrink_with_precision() -> None:
    model = build_model("tiny-cnn", device="meta")
    v100 = find_kind("v100")
    plain = make_analytic_profile(model, v100, batch_sizes=(32, 256))
    half = make_analytic_profile(model, v100, batch_sizes=(32, 256), precision="fp16")
    for full, lean in zip(plain.layers[:-1], half.layers[:-1]):
        assert full.forward_s[0] <= full.forward_s[1]
        assert lean.output_bytes == full.output_bytes / 2
        assert lean.parameter_bytes == full.parameter_bytes


def test_what_crosses_a_cut_is_what_the_model_carries() -> None:
    for name in ("tiny-cnn", "resnet18", "gpt-tiny"):
        model = build_model(name, device="meta")
        found = crossings(make_analytic_profile(model, ROUND, batch_sizes=(2,)))
        for cut in range(1, model.num_layers):
            assert found[cut] == sum(spec.bytes_per_row for spec in model.carried(cut)), (name, cut)


def test_layers_that_share_weights_are_profiled_as_one() -> None:
    model = build_model("gpt2-small", device="meta")
    profile = make_analytic_profile(model, ROUND, batch_sizes=(1,))
    assert profile.names == model.names
    assert [layer.name for layer in profile.layers if layer.cuttable] == [
        name for number, name in enumerate(model.names) if number == 0 or number in model.cuts()
    ]


def test_a_profile_from_shapes_does_not_touch_the_model() -> None:
    model = build_model("tiny-cnn")
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    make_analytic_profile(model, ROUND, batch_sizes=(4,))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.model.parameters())


FIGURES = (("titan-v", "alexnet-of", 256, 4929.58, "fp32"), ("titan-v", "vgg16", 32, 208.458, "fp32"))


@pytest.mark.parametrize(
    ("kind", "model", "rows", "rate", "precision"), [*FIGURES, ("v100", "resnet50", 256, 1443.55, "fp16")]
)
def test_the_device_files_meet_the_figures_that_they_were_fitted_to(
    kind: str, model: str, rows: int, rate: float, precision: str
) -> None:
    profile = make_analytic_profile(
        build_model(model, device="meta"),
        find_kind(kind),
        batch_sizes=(rows,),
        precision=precision,  # type: ignore[arg-type]
    )
    step = sum(layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers) + profile.optimizer_s
    assert rows / step == pytest.approx(rate, rel=0.025)


def test_calibrating_finds_the_efficiencies_that_made_the_figures() -> None:
    """Steps are made up with known efficiencies; starting elsewhere, the fit meets the steps again."""
    truth = replace(find_kind("titan-v"), efficiency={"conv": 1.2, "matmul": 0.9, "memory": 0.6})
    start = replace(truth, efficiency={"conv": 0.8, "matmul": 0.9, "memory": 0.4})
    figures = []
    for name, rows in (("alexnet-of", 128), ("vgg16", 16)):
        model = build_model(name, device="meta")
        table = record_work(make_pieces(model), rows)
        weights = sum(parameter.numel() * 4 for parameter in model.model.parameters())
        figures.append(
            Measurement(model=model, batch=rows, samples_per_s=rows / step_seconds(table, weights, truth, "fp32"))
        )
    fitted = calibrate_device(start, figures)
    assert fitted.efficiency["conv"] == pytest.approx(1.2, rel=0.1)
    assert fitted.efficiency["memory"] == pytest.approx(0.6, rel=0.3)
    for figure in figures:
        profile = make_analytic_profile(figure.model, fitted, batch_sizes=(figure.batch,))
        step = sum(layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers) + profile.optimizer_s
        assert figure.batch / step == pytest.approx(figure.samples_per_s, rel=0.02)
    assert "fitted to one device's figures" in fitted.notes[-1]


def test_what_the_figures_hardly_contain_is_left_alone() -> None:
    kind = find_kind("titan-v")
    fitted = calibrate_device(
        kind, [Measurement(model=build_model("vgg16", device="meta"), batch=8, samples_per_s=150.0)]
    )
    assert fitted.efficiency["matmul"] == kind.efficiency["matmul"]
    assert fitted.efficiency["conv"] != kind.efficiency["conv"]


def test_calibrating_without_or_with_impossible_figures_is_refused() -> None:
    with pytest.raises(ProfileError, match="nothing to calibrate with"):
        calibrate_device(ROUND, [])
    with pytest.raises(ProfileError, match=r"0\.0 samples/s at batch 8"):
        Measurement(model=two_linears(), batch=8, samples_per_s=0.0)


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(ProfileError, match="has no loss"):
        make_pieces(make_layered(nn.Sequential(nn.Linear(4, 4)), (torch.zeros(2, 4),)))
