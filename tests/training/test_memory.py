"""Memory in the log: as torch's allocator counts it, and as the driver does. The driver is a stand-in here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from stagewright.training.telling import memory_figures

CARD = torch.device("cuda", 1)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second card with a name, and an allocator that has reserved 3 bytes of it."""
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 3)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=f"card-{device.index}"))


def stand_in(used: dict[str, int]) -> SimpleNamespace:
    """A driver that knows these cards."""

    class NVMLError(Exception):
        pass

    def handle(name: str) -> str:
        if name not in used:
            raise NVMLError(name)
        return name

    return SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=used[card]),
    )  # fmt: skip


def test_a_card_has_both_figures(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in({"GPU-card-0": 5, "GPU-card-1": 7}))
    assert memory_figures(CARD) == {"memory_bytes": 3, "driver_bytes": 7}


def test_a_driver_that_cannot_be_asked_is_left_out(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in({}))
    assert memory_figures(CARD) == {"memory_bytes": 3}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert memory_figures(CARD) == {"memory_bytes": 3}


def test_a_worker_on_the_cpu_has_the_peak_of_its_process() -> None:
    figures = memory_figures(torch.device("cpu"))
    assert list(figures) == ["memory_bytes"]
    assert figures["memory_bytes"] > 1 << 20
