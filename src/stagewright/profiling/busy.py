"""A process that trains something small until it is told to stop: `python -m stagewright.profiling.busy THREADS`.

A core computes faster while the others of its machine sleep, by its clock, its caches and its memory. In a run none
of them sleeps, so a profile is measured beside such processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def busy_cores(count: int, threads: int) -> Iterator[None]:
    """Meanwhile so many other processes compute, each with this many threads."""
    command = [sys.executable, "-m", __name__, str(threads)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it computes now
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _end_with_parent() -> None:
    sys.stdin.read()  # until whoever started this lets go of it, or is gone
    os._exit(0)


def _main(threads: int) -> None:
    """Trains for ever what workers have: convolutions, a linear layer and its optimizer."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    net = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 2048))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    rows = torch.zeros(16, 32, 16, 16)
    print("computing", flush=True)
    while True:
        net(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
