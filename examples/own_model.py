"""Your own model, loss, optimizer and data: `python examples/own_model.py`, or under torchrun with four workers."""

import torch
from torch import nn
import stagewright as sw

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def rows(batch, start, stop):  # any rows of any batch, the same on every worker
    generator = torch.Generator().manual_seed(batch)
    inputs = torch.randn(64, 20, generator=generator)
    return (inputs[start:stop],), (inputs[start:stop, :4].argmax(dim=1),)

sample, target = torch.zeros(2, 20), torch.zeros(2, dtype=torch.long)
layered = sw.make_layered(model, (sample,), loss=sw.mean_loss(nn.functional.cross_entropy), targets=(target,))
stages = (sw.Stage(layers=layered.names[:2], devices=sw.parse_devices("0:0-2")),
          sw.Stage(layers=layered.names[2:], devices=sw.parse_devices("0:3")))  # fmt: skip
plan = sw.Plan(model="own", stages=stages, batch=64, num_microbatches=4)
record = sw.train(sw.make_schedule(plan), layered, data=rows, job=sw.Job(name="own", steps=60),
                  settings=sw.Settings(device="cuda" if torch.cuda.is_available() else "cpu"),
                  recipe=lambda parameters: torch.optim.Adam(parameters, lr=1e-2))  # fmt: skip
if sw.is_main():  # every worker comes here
    print(f"loss {record.points[0].value:.3f} → {[p for p in record.points if p.name == 'loss'][-1].value:.3f}")
