"""Any module as layers: sequential ones by their children, others by tracing, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stagewright.errors import ModelError
from stagewright.models import cross_entropy_sum, make_layered, mean_loss, token_cross_entropy_sum


def summed(*outputs: Tensor) -> Tensor:
    return torch.stack([output.square().sum() for output in outputs]).sum()


def check(layered: Any, inputs: Any, run_whole: Any, run_cut: Any) -> None:
    """Every cut, and all of them at once."""
    whole = run_whole(layered, lambda model: tree_leaves(model(*inputs)), summed, ())
    for cuts in [*((cut,) for cut in layered.cuts()), layered.cuts()]:
        assert not whole.differences(run_cut(layered, cuts, inputs, ())), cuts


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


def test_a_sequential_model_is_cut_between_its_children(run_whole: Any, run_cut: Any) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Sequential(Residual(), nn.Dropout(0.5)), nn.Linear(4, 2)
    )
    layered = make_layered(model, (torch.randn(1, 4),), loss=summed)
    assert layered.names == ("0", "1", "2.0", "2.1", "3", "loss")
    assert layered.cuts() == (1, 2, 3, 4, 5)
    check(layered, [torch.randn(5, 4)], run_whole, run_cut)


def test_a_flow_that_is_no_chain_carries_what_later_layers_need(run_whole: Any, run_cut: Any) -> None:
    class Skips(nn.Module):
        """a ─▶ b ─▶ c + a, with the second input needed only at the end."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor, flip: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
            a = self.a(x)
            out = self.c(torch.relu(self.b(a))) + a
            return -out if flip else out * scale, {"a": a}

    sample = (torch.randn(2, 4), torch.randn(2, 1))
    layered = make_layered(Skips(), sample, {"flip": False}, loss=summed)
    assert layered.names == ("a", "b", "c", "loss")
    assert [spec.name for spec in layered.inputs] == ["x", "scale"]
    assert [spec.shape_per_row for spec in layered.carried(2)] == [(1,), (4,), (4,)]
    assert [spec.needs_grad for spec in layered.carried(2)] == [False, True, True]
    check(layered, [torch.randn(3, 4), torch.randn(3, 1)], run_whole, run_cut)


def test_sizes_follow_the_rows_and_masks_are_made_again(run_whole: Any, run_cut: Any) -> None:
    class Sizes(nn.Module):
        """Reshapes by the number of rows, and uses one mask in two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows, length, width = x.shape
            mask = torch.ones(length, length, device=x.device).tril()
            x = mask @ self.a(x.reshape(rows * length, width)).view(rows, length, width)
            return mask @ self.b(x).reshape(rows * length, width).view(rows, length, width)

    layered = make_layered(Sizes(), (torch.randn(2, 3, 4),), loss=summed)
    assert layered.names == ("a", "b", "loss")
    assert [spec.shape_per_row for spec in layered.carried(1)] == [(3, 4)]
    check(layered, [torch.randn(5, 3, 4)], run_whole, run_cut)


def test_a_value_without_rows_merges_the_layers_around_it() -> None:
    class Mixing(nn.Module):
        """b is applied to the mean over the rows, which belongs to no row."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            mean = x.mean(dim=0)
            return self.c(x + self.b(mean))

    with pytest.warns(UserWarning, match="layer 'a' mixes the rows"):
        assert make_layered(Mixing(), (torch.randn(2, 4),), loss=summed).names == ("a", "c", "loss")


def test_evaluation_switches_dropout_and_batch_norm_off() -> None:
    class Branching(nn.Module):
        """torch.fx cannot trace the branch, so the model is exported."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.drop, self.fc = nn.Dropout(0.5), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.conv(x)).mean(dim=(2, 3))
            if x.shape[1] == 4 and x.requires_grad is not None:
                x = self.drop(x)
            return self.fc(x)

    model = Branching()
    layered = make_layered(model, (torch.randn(2, 3, 8, 8),))
    images = torch.randn(3, 3, 8, 8)
    stages = [layered.stage(cut, cut + 1).eval() for cut in range(layered.num_layers)]
    values: tuple[Tensor, ...] = (images,)
    for stage in stages:
        values = stage(*values)
    assert torch.equal(values[0], model.eval()(images))
    assert model.norm.num_batches_tracked == 0


def test_a_model_that_branches_on_its_mode_trains_and_refuses_to_evaluate(run_whole: Any, run_cut: Any) -> None:
    class DropPath(nn.Module):
        """Drops whole rows in training."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(x * torch.rand(x.size(0), 1).round() if self.training else x)

    layered = make_layered(DropPath(), (torch.randn(2, 4),), loss=summed)
    check(layered, [torch.randn(5, 4)], run_whole, run_cut)
    with pytest.raises(ModelError, match="branches on `training`"):
        layered.stage(0, 1).eval()(torch.randn(2, 4))


def test_a_copy_of_a_stage_has_weights_of_its_own() -> None:
    class Clashing(nn.Module):
        """Its children have the names of a stage's own attributes."""

        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.outputs = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.outputs(self.inputs(x))

    stage = make_layered(Clashing(), (torch.randn(2, 4),)).stage(0, 2)
    other, rows = copy.deepcopy(stage), torch.randn(3, 4)
    assert torch.equal(stage(rows)[0], other(rows)[0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert stage(rows)[0].any()
    assert not other(rows)[0].any()
    assert next(name for name, _ in other.named_parameters()) == "inputs.weight"


def test_stages_hold_the_models_own_parameters_under_its_own_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual(), nn.BatchNorm1d(4))
    layered = make_layered(model, (torch.randn(2, 4),))
    stages = [layered.stage(0, 1), layered.stage(1, 3)]
    parts = {name: p for stage in stages for name, p in stage.named_parameters()}
    assert parts.keys() == dict(model.named_parameters()).keys()
    assert all(parts[name] is parameter for name, parameter in model.named_parameters())
    assert {k for stage in stages for k in stage.state_dict()} == set(model.state_dict())
    assert layered.parameter_names(0, 1) == ("0.weight", "0.bias")
    assert layered.parameter_names(1, 3)[0] == "1.first.weight"


def test_tied_weights_may_be_cut_apart(run_whole: Any, run_cut: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    layered = make_layered(model, (torch.randn(2, 4),), loss=summed)
    assert layered.tied == (("1.weight", (1, 2)),)
    assert layered.cuts() == (1, 2, 3, 4)
    check(layered, [torch.randn(3, 4)], run_whole, run_cut)
    assert layered.stage(1, 2).get_parameter("1.weight") is layered.stage(2, 5).get_parameter("2.weight")


def test_microbatches_of_any_sizes_add_up_to_the_batch() -> None:
    model = nn.Linear(4, 3).double()
    rows, labels = torch.randn(7, 4).double(), torch.randint(0, 3, (7,))
    for loss in (cross_entropy_sum(), mean_loss(nn.functional.cross_entropy)):
        parts = sum(loss(model(r), t) for r, t in zip(rows.split([1, 4, 2]), labels.split([1, 4, 2])))
        torch.testing.assert_close(parts / 7, nn.functional.cross_entropy(model(rows), labels), check_dtype=False)


def test_the_loss_of_tokens_is_the_mean_over_those_that_count() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, 2, -100], [0, 4, 3]])
    loss = token_cross_entropy_sum()
    mean = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss(logits, labels) / loss.count(labels), mean)


def test_what_cannot_be_layered_is_refused_with_a_way_out() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.b(x)

    with pytest.raises(
        ModelError,
        match=r"Deciding cannot be traced at .*test_layered\.py:\d+ \(return self\.a\(x\) if[\s\S]*torch\.where",
    ):
        make_layered(Deciding(), (torch.randn(2, 4),))
    with pytest.raises(ModelError, match=r"differ in rows: \(2, 4\), \(1, 4\)"):
        make_layered(Residual(), (torch.randn(2, 4), torch.randn(1, 4)))
    with pytest.raises(ModelError, match="no tensor"):
        make_layered(Residual(), ())
    with pytest.raises(ModelError, match="one input, the sample has 2"):
        make_layered(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4), torch.randn(2, 4)))
    with pytest.raises(ModelError, match="the loss has parameters"):
        make_layered(Residual(), (torch.randn(2, 4),), loss=Residual())


def test_a_stage_says_what_it_takes() -> None:
    layered = make_layered(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),))
    with pytest.raises(ModelError, match="no stage from layer 1 to 1: the model has layers 0 … 1"):
        layered.stage(1, 1)
    with pytest.raises(ModelError, match=r"stage '1' … '1' takes 1 tensors, got 2"):
        layered.stage(1, 2)(torch.randn(2, 4), torch.randn(2, 4))
