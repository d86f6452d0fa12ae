"""What a CPU computes with, chosen by measuring."""

from __future__ import annotations

import pytest
import torch

from stagewright.models import Layered, build_model
from stagewright.profile import Kernels
from stagewright.profiling import kernels
from stagewright.profiling.kernels import computing_with, faster_kernels
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import open_world


def convolved() -> str:
    """Which kernels torch would take for a convolution of 16 rows now."""
    images, weights = torch.zeros(16, 8, 9, 9), torch.zeros(8, 8, 3, 3)
    chosen = torch._C._select_conv_backend(images, weights, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return str(chosen).rpartition(".")[2]


def test_plain_kernels_are_products_of_matrices_for_a_while() -> None:
    usual = convolved()
    with computing_with("plain"):
        assert convolved() == "Slow2d"
        with computing_with("onednn"):
            assert convolved() == usual
        assert convolved() == "Slow2d"
    assert convolved() == usual


def test_plain_kernels_compute_the_same() -> None:
    images, weights = torch.randn(16, 8, 9, 9), torch.randn(8, 8, 3, 3)
    usual = torch.nn.functional.conv2d(images, weights)
    with computing_with("plain"):
        torch.testing.assert_close(torch.nn.functional.conv2d(images, weights), usual)


@pytest.mark.parametrize(("plain_s", "faster"), [(0.5, "plain"), (0.97, "onednn"), (2.0, "onednn")])
def test_plain_kernels_have_to_be_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, plain_s: float, faster: Kernels
) -> None:
    def pretended(model: Layered, rows: int) -> float:
        return 1.0 if torch.backends.mkldnn.enabled else plain_s

    monkeypatch.setattr(kernels, "time_model", pretended)
    assert faster_kernels(build_model("tiny-cnn"), 2) == faster


def test_a_run_computes_with_the_kernels_of_its_settings() -> None:
    with open_world(Settings(kernels="plain")):
        assert convolved() == "Slow2d"
    assert torch.backends.mkldnn.enabled
