"""A run one of whose workers computes slowly: `-m tests.runtime.lagging FOLDER WHO TIMES`, "all" or "none"."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor, nn

import stagewright as sw
from stagewright.cluster import parse_placement

NAP_S, ROWS = 0.08, 6


class Nap(nn.Module):
    """Does nothing, for a while."""

    def forward(self, rows: Tensor) -> Tensor:
        who, times = sys.argv[2:4]
        time.sleep(NAP_S * (float(times) if who in (os.environ.get("RANK"), "all") else 1.0))
        return rows


def main(folder: str, who: str, times: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 6), Nap()), nn.Sequential(nn.Linear(6, 4), Nap()))
    loss, target = sw.mean_loss(nn.functional.cross_entropy), torch.zeros(2, dtype=torch.long)
    layered = sw.make_layered(net, (torch.zeros(2, 6),), loss=loss, targets=(target,))

    def rows(batch: int, start: int, stop: int):
        inputs = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(batch))
        return (inputs[start:stop],), (inputs[start:stop, :4].argmax(dim=1),)

    front, back = parse_placement("0:0-1.0:2")
    stages = (sw.Stage(layers=layered.names[:2], devices=front), sw.Stage(layers=layered.names[2:], devices=back))
    plan = sw.Plan(
        model="lagging", stages=stages, batch=ROWS, num_microbatches=2, predicted_step_s=8 * NAP_S,
        predicted_compute_s=(2 * NAP_S, 2 * NAP_S), predicted_send_s=(0.01, 0.01), predicted_on="this-host",
    )  # fmt: skip
    job = sw.Job(name="lagging", steps=31, check_replicas=10, save_final=False)
    settings = sw.Settings(timeout_s=60, self_check=False)
    sw.train(sw.make_schedule(plan), layered, data=rows, job=job, settings=settings, folder=folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
