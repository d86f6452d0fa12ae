"""Messages between CPU workers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.plan import Plan
from stagewright.runtime.transport.channel import (
    BackgroundThread,
    Channel,
    Parts,
    Promise,
    Receipt,
    new_tensor,
    on_the_wire,
)
from stagewright.runtime.world import World


class GlooTransport:
    """Messages over sockets, matched by their tags."""

    name = "gloo"
    lookahead = 2

    def __init__(self, world: World, plan: Plan, *, threads_wait: bool = False) -> None:
        self.world = world
        self.arrived = threading.Event()
        self._timeout_s = world.timeout.total_seconds()
        self._sent = BackgroundThread("sends")
        channels = channels_of(plan)
        self._number = {channel: number for number, channel in enumerate(channels)}
        self._waiters = {channel: BackgroundThread(str(channel), self.arrived) for channel in channels if threads_wait}

    def _tag(self, channel: Channel, tensor: int) -> int:
        return tensor * len(self._number) + self._number[channel]

    def send(self, channel: Channel, parts: Parts) -> None:
        kept = [(peer, [on_the_wire(tensor) for tensor in tensors]) for peer, tensors in parts]
        works = [
            dist.isend(tensor, peer, tag=self._tag(channel, number))
            for peer, tensors in kept
            for number, tensor in enumerate(tensors)
        ]

        def leave() -> None:
            wait_for(works)
            kept.clear()

        self._sent.add(leave)

    def receive(self, channel: Channel, parts: Parts) -> Receipt:
        works = [
            dist.irecv(on_the_wire(tensor), peer, tag=self._tag(channel, number))
            for peer, tensors in parts
            for number, tensor in enumerate(tensors)
        ]
        waiter = self._waiters.get(channel)
        return _Works(works) if waiter is None else Promise(waiter, lambda: wait_for(works), self._timeout_s)

    def check(self) -> None:
        for thread in (self._sent, *self._waiters.values()):
            thread.check()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        return new_tensor(shape, dtype, channels_last, self.world.device)

    def close(self) -> None:
        for thread in (self._sent, *self._waiters.values()):
            thread.close(self._timeout_s)


class _Works:
    """The receipt of several messages that the worker waits for itself."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        wait_for(self._works)

    def is_done(self) -> bool:
        return False


def wait_for(works: Sequence[dist.Work | None]) -> None:
    """Returns when all are through."""
    for work in works:
        if work is not None:
            work.wait()


def channels_of(plan: Plan) -> list[Channel]:
    """Both directions of every boundary."""
    return [Channel(stage, way) for stage in range(len(plan.stages) - 1) for way in (True, False)]
