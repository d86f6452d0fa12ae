"""Profiles measured on this machine."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import process_time, sleep
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.errors import ProfileError
from stagewright.models import Layered, build_model, cross_entropy_sum, make_layered
from stagewright.profile import Profile
from stagewright.profiling import measured
from stagewright.profiling.layers import Pieces, make_pieces, run_units
from stagewright.profiling.measured import layers_against_model, make_profile


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Timings of one thread are steadier on a machine that does other things too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_profile_has_every_layer_at_every_size(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = build_model("tiny-cnn")
    profile = make_profile(
        model, batch_sizes=(4, 16), name="tiny-cnn", repeats=3, progress=lambda done, total: seen.append((done, total))
    )
    assert profile.names == model.names
    assert (profile.device, profile.source, profile.precision) == ("cpu", "measured", "fp32")
    assert all(len(layer.forward_s) == 2 and min(layer.forward_s) > 0 for layer in profile.layers)
    assert profile.optimizer_s > 0
    assert profile.versions["torch"] == str(torch.__version__)
    assert seen == [(number + 1, 10) for number in range(10)]
    assert Profile.load(profile.save(tmp_path / "p.json")) == profile


def test_other_workers_compute_meanwhile_and_are_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others, where they are more than the cores."""
    seen: set[int] = set()

    def beside() -> list[str]:
        tables = (Path(f"/proc/self/task/{task.name}/children") for task in Path("/proc/self/task").iterdir())
        numbers = {number for table in tables for number in table.read_text().split()}
        names = [Path(f"/proc/{number}/cmdline").read_text() for number in numbers]
        return [name for name in names if "stagewright.profiling.busy" in name]

    monkeypatch.setattr(measured, "num_cores", lambda: 3)
    model = build_model("tiny-cnn")
    made = make_profile(
        model, batch_sizes=(2,), repeats=1, workers=4, progress=lambda done, total: seen.add(len(beside()))
    )
    assert seen == {3}
    assert beside() == []
    assert "3 workers beside" in made.notes[0]


def test_layers_see_rows_like_real_ones_and_waiting_counts_where_each_worker_has_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where workers take turns on a core, waiting is the others' time."""
    seen: list[float] = []

    def slowly(pieces: Pieces, inputs: list[torch.Tensor], targets: object, mark: Any, **given: Any) -> None:
        def mark_late(unit: int, is_backward: bool) -> None:
            sleep(0.01)
            mark(unit, is_backward)

        seen.append(float(inputs[0].std()))
        run_units(pieces, inputs, targets, mark_late, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(measured, "run_units", slowly)
    monkeypatch.setattr(measured, "num_cores", lambda: 1)
    alone, shared = (make_profile(wide_model(), batch_sizes=(2,), repeats=1, workers=count) for count in (1, 2))
    assert min(seen) > 0.5
    assert all(layer.forward_s[0] > 0.01 for layer in alone.layers)
    assert all(layer.forward_s[0] < 0.01 for layer in shared.layers)


def wide_model() -> Layered:
    """Linear layers with something between that has no weights."""
    layers = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256))
    labels = torch.zeros(2, dtype=torch.long)
    return make_layered(layers, (torch.zeros(2, 8),), loss=cross_entropy_sum(), targets=(labels,))


def test_the_part_of_backward_that_only_weights_need_is_all_of_the_firsts_and_none_without_weights() -> None:
    made = make_profile(wide_model(), batch_sizes=(4, 64), repeats=3)
    first, relu, middle, loss = made.layers
    assert first.weight_s == first.backward_s
    assert relu.weight_s == loss.weight_s == (0.0, 0.0)
    assert all(0.0 <= part <= whole for part, whole in zip(middle.weight_s, middle.backward_s))


def test_backward_without_weights_runs_and_leaves_them_without_gradients() -> None:
    model = wide_model()
    pieces = make_pieces(model, "fp32")
    inputs, targets = pieces.rows(4)
    done: list[tuple[int, bool]] = []
    run_units(pieces, inputs, targets, lambda unit, is_backward: done.append((unit, is_backward)), weights=False)
    assert done == [(number, False) for number in range(4)] + [(number, True) for number in (3, 2, 1, 0)]
    assert all(parameter.grad is None for parameter in model.model.parameters())
    run_units(pieces, inputs, targets, lambda unit, is_backward: None)
    assert all(parameter.grad is not None for parameter in model.model.parameters())


def test_a_users_own_model_can_be_profiled() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(x + torch.relu(self.inner(x)))

    layered = make_layered(
        Residual(), (torch.zeros(2, 8),), loss=cross_entropy_sum(), targets=(torch.zeros(2, dtype=torch.long),)
    )
    profile = make_profile(layered, batch_sizes=(3,), repeats=1)
    assert profile.model == "residual"
    assert profile.layers[-1].name == "loss"
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * (8 * 8 + 8 + 8 * 4 + 4)


def test_profiling_leaves_the_model_as_it_was() -> None:
    model = build_model("resnet18", image_size=32)
    model.model.eval()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    state = torch.random.get_rng_state()
    make_profile(model, batch_sizes=(2,), repeats=1)
    after = model.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.model.parameters())
    assert not model.model.training
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["resnet18", pytest.param("vgg16", marks=pytest.mark.slow)])
def test_the_layers_add_up_to_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 5%, by the median over several profiles: on a machine that does other things each alone may be off.

    CPU seconds, not those on the wall, which also count what other programs do meanwhile.
    """
    monkeypatch.setattr(measured, "perf_counter", process_time)
    model = build_model(name, image_size=32)
    ratios: list[float] = []
    while len(ratios) < 3 or (abs(median(ratios) - 1) > 0.05 and len(ratios) < 15):
        ratios += layers_against_model(make_profile(model, batch_sizes=(16,), repeats=5))
    with capsys.disabled():
        print(f"\nsum of the layers against the whole {name}, CPU: {median(ratios) - 1:+.1%}, {len(ratios)} profiles")
    assert abs(median(ratios) - 1) < 0.05


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "rows"), [("resnet50", 64), ("vgg16", 32), ("alexnet", 256)])
def test_the_layers_add_up_to_the_model_on_a_gpu(
    name: str, rows: int, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model(name, device="cuda")
    profile = make_profile(model, batch_sizes=(rows,), precision=precision)  # type: ignore[arg-type]
    ratio = layers_against_model(profile)[0]
    with capsys.disabled():
        print(f"\nsum of the layers against the whole {name}, {precision}, {rows} rows: {ratio - 1:+.2%}")
    assert ratio == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 8)])
def test_a_batch_of_zero_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ProfileError, match="expected 1 row or more"):
        make_profile(build_model("tiny-cnn"), batch_sizes=sizes)


def test_sizes_out_of_order_and_no_repeats_are_refused() -> None:
    with pytest.raises(ProfileError, match="ascending"):
        make_profile(build_model("tiny-cnn"), batch_sizes=(8, 4), repeats=1)
    with pytest.raises(ProfileError, match="0 repeats"):
        make_profile(build_model("tiny-cnn"), batch_sizes=(4,), repeats=0)


def test_lower_precisions_run_on_the_cpu_too() -> None:
    profile = make_profile(build_model("tiny-cnn"), batch_sizes=(4,), precision="bf16", repeats=1)
    assert profile.layers[0].output_bytes == build_model("tiny-cnn").carried(1)[0].bytes_per_row / 2
