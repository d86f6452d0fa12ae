"""Which kernels a CPU computes with: oneDNN's, which torch takes by default, or plain products of matrices.

oneDNN is made for other processors than some that torch runs on: on Neoverse-N1 cores it takes 1.8 times as long for a
pass over ResNet-50, and a tenth less for a GPT. Which is faster is measured. Without oneDNN torch takes NNPACK from 16
rows on, which took twice as long there again; plain kernels do without both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import get_args

import torch

from stagewright.models.layered import Layered
from stagewright.profile import Kernels
from stagewright.profiling.measured import time_model

REPEATS = 3
CLEARLY = 0.95
"""Plain kernels are the exception: they have to take less than this much of oneDNN's time."""


@contextmanager
def computing_with(kernels: Kernels) -> Iterator[None]:
    """Lets this process compute with some kernels, for a while."""
    usual = torch.backends.mkldnn.enabled
    usual_nnpack = torch.backends.nnpack.set_flags(kernels == "onednn")  # type: ignore[no-untyped-call]
    torch.backends.mkldnn.enabled = kernels == "onednn"  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = usual
        torch.backends.nnpack.set_flags(*usual_nnpack)  # type: ignore[no-untyped-call]


def faster_kernels(model: Layered, rows: int) -> Kernels:
    """The kernels with which this machine passes over a model in less time."""
    taken: dict[Kernels, list[float]] = {kernels: [] for kernels in get_args(Kernels)}
    for _ in range(1 + REPEATS):  # the first takes memory
        for kernels, seconds in taken.items():
            with computing_with(kernels):
                seconds.append(time_model(model, rows))
    own = {kernels: median(seconds[1:]) for kernels, seconds in taken.items()}
    return "plain" if own["plain"] < CLEARLY * own["onednn"] else "onednn"
