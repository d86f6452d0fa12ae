"""What an optimizer step costs workers on CPUs beside their layers: messages, waiting, the loop itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from stagewright.cluster import Cluster
from stagewright.errors import ClusterError
from stagewright.models import Layered, cross_entropy_sum, make_layered
from stagewright.record import Record

_STEPS, _WARM_UP, _LIMIT_S = 120, 40, 300.0


def next_to_nothing() -> Layered:
    """A model that takes images and has hardly anything to compute."""
    net = nn.Sequential(OrderedDict(a=nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8)), b=nn.Linear(8, 10)))
    image, label = torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64)
    return make_layered(net, (image,), loss=cross_entropy_sum(0.0), targets=(label,))


def measure_step_overhead(cluster: Cluster) -> Cluster:
    """The cluster of this machine's CPU workers with what a step costs them beside its layers.

    Two stages of next to nothing are trained by as many workers; where these share cores, it is core-seconds.
    """
    workers = len(cluster.device_ids)
    cores = min(cluster.cores or workers, workers)
    overhead_s = float(f"{_step_s(workers) * cores / workers:.4g}")
    (host,) = cluster.hosts
    devices = tuple(replace(device, step_overhead_s=overhead_s) for device in host.devices)
    notes = (*cluster.notes, "what a step costs beside its layers: measured with a model of next to nothing")
    return replace(cluster, hosts=(replace(host, devices=devices),), notes=notes)


def _step_s(workers: int) -> float:
    """The median step of a real run."""
    first = f"0:0-{workers - 2}" if workers > 2 else "0:0"
    with tempfile.TemporaryDirectory(prefix="stagewright-") as folder:
        command = [
            sys.executable, "-m", "stagewright", "train", f"python:{__file__}:{next_to_nothing.__name__}",
            "--placement", f"{first}.0:{workers - 1}", "--batch", f"{4 * workers}", "--microbatches", "2",
            "--steps", str(_STEPS), "--warm-up", str(_WARM_UP), "--device", "cpu", "--no-save-final",
            "--no-self-check", "--out", folder,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=environment)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{workers} workers did not train {_STEPS} steps of nothing in {_LIMIT_S:g} s") from None
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
            raise ClusterError(f"workers failed while a step's overhead was measured; they said: {last[0]}")
        return Record.load(Path(folder, "record.json")).median_step_s
