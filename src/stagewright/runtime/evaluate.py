"""Evaluation through the same stages: forward only, batches of any size, the newest weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.plan import DEFAULT_POLICY, Plan
from stagewright.policy import RULES
from stagewright.runtime.feed import Feed
from stagewright.runtime.reduce import copy_from
from stagewright.runtime.worker import Worker
from stagewright.schedule import Kind, Schedule
from stagewright.scheduling import make_schedule

_FORWARD_ONLY = {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}


def _forward_schedule(plan: Plan, rows: int) -> Schedule:
    """The forwards and transfers of a batch of `rows` rows over the plan's stages."""
    stages = tuple(replace(stage, versions=1) for stage in plan.stages)
    microbatches = min(plan.num_microbatches, rows)
    policy = DEFAULT_POLICY if RULES[plan.policy].by_arrival else plan.policy
    whole = make_schedule(
        replace(plan, stages=stages, batch=rows, num_microbatches=microbatches, policy=policy, hold=None)
    )
    orders = tuple(tuple(action for action in order if action.kind in _FORWARD_ONLY) for order in whole.orders)
    return replace(whole, orders=orders)


@torch.no_grad()
def evaluate(worker: Worker, feed: Feed, num_rows: int, batch: int) -> Tensor:
    """Loss and metric over all rows, as means; every worker gets them."""
    if num_rows < 1:
        raise ValueError("evaluation needs at least one row")
    for here in worker.replicas.values():  # running statistics follow each replica's own rows: the first one's hold
        members = worker.plan.workers[here.stage]
        group = worker.world.group("reduce", members)
        if group is not None:
            copy_from(members[0], here.weights.modules[0].buffers(), group)
    for module in worker.current_modules():
        module.eval()
    whole, rest = divmod(num_rows, batch)
    with ExitStack() as stack:
        for versions in {
            id(each): each for here in worker.replicas.values() for each in (here.weights, *here.tied)
        }.values():
            stack.enter_context(versions.uncorrected())
        sums = [_run_forward(worker, feed, batch, whole, 0)] if whole else []
        sums += [_run_forward(worker, feed, rest, 1, whole)] if rest else []
    for module in worker.current_modules():
        module.train()
    return means(torch.stack(sums).sum(0), num_rows)


def means(sums: Tensor, num_rows: int) -> Tensor:
    """Loss and metric as means: the loss over what it counts, the metric over rows."""
    loss, number, metric = sums[:1], sums[1:2], sums[2:]
    return torch.cat([loss / torch.where(number > 0, number, 1), metric / num_rows])


def _run_forward(worker: Worker, feed: Feed, rows: int, num_batches: int, first_batch: int) -> Tensor:
    """The sums of loss and metric over some batches of one size."""
    helper = worker.for_evaluation(_forward_schedule(worker.plan, rows), feed)
    helper.run(num_batches, first_batch)
    numbers = range(first_batch, first_batch + num_batches)
    sums = torch.stack([helper.figures(number) for number in numbers]).sum(0).cpu()
    if worker.world.control is not None:
        dist.all_reduce(sums, group=worker.world.control)
    return sums
