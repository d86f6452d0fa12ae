"""Messages between cards by way of the hosts' memory.

    card ──copy──▶ pinned memory ──socket──▶ pinned memory ──copy──▶ card
         side stream             gloo                     side stream

Nothing here runs on a multiprocessor, and nothing on the card waits for a peer: the rows of a receive are copied to the
card when they have come. So workers that share a card cannot keep each other from computing, as receives that spin
inside a kernel can.
"""

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
from stagewright.runtime.transport.gloo import channels_of, wait_for
from stagewright.runtime.world import World

STRANDS = 4
"""Groups of a channel, each with a socket thread of its own: one thread alone moves about 1 GB/s."""


class StagedTransport:
    """Messages over sockets between the pinned memories of the workers' hosts."""

    name = "gloo through pinned memory"
    lookahead = 2

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.arrived = threading.Event()
        self._timeout_s = world.timeout.total_seconds()
        self._compute = torch.cuda.current_stream()
        self._out, self._in = new_stream(), new_stream()
        self._strands: dict[Channel, list[dist.ProcessGroup | None]] = {}
        for channel in channels_of(plan):
            members = tuple(sorted({*plan.workers[channel.stage], *plan.workers[channel.stage + 1]}))
            self._strands[channel] = [world.group(f"{channel} {strand}", members, "gloo") for strand in range(STRANDS)]
        self._sends = {channel: BackgroundThread(f"{channel} sends") for channel in self._strands}
        self._sent = {channel: BackgroundThread(f"{channel} sent") for channel in self._strands}
        self._receives = {channel: BackgroundThread(f"{channel} receives", self.arrived) for channel in self._strands}

    def _strand(self, channel: Channel, peer: int) -> dist.ProcessGroup | None:
        return self._strands[channel][(peer + self.world.worker) % STRANDS]

    def send(self, channel: Channel, parts: Parts) -> None:
        made = new_event()
        made.record()
        kept = [(peer, number, on_the_wire(tensor)) for peer, tensors in parts for number, tensor in enumerate(tensors)]
        copied, pinned = new_event(), []
        with torch.cuda.stream(self._out):
            self._out.wait_event(made)
            for peer, number, tensor in kept:
                pinned.append((peer, number, _pinned_like(tensor).copy_(tensor, non_blocking=True)))
            copied.record()

        def leave() -> None:
            copied.synchronize()
            kept.clear()
            works = [dist.isend(rows, peer, self._strand(channel, peer), tag=number) for peer, number, rows in pinned]

            def let_go() -> None:
                wait_for(works)
                pinned.clear()

            self._sent[channel].add(let_go)

        self._sends[channel].add(leave)

    def receive(self, channel: Channel, parts: Parts) -> Receipt:
        coming = []
        for peer, tensors in parts:
            for number, tensor in enumerate(tensors):
                target = on_the_wire(tensor)
                pinned = _pinned_like(target)
                work = dist.irecv(pinned, peer, self._strand(channel, peer), tag=number)
                coming.append((work, pinned, target))
        here = new_event()

        def arrive() -> None:
            with torch.cuda.stream(self._in):
                for work, pinned, target in coming:
                    wait_for([work])
                    target.copy_(pinned, non_blocking=True)
                here.record()
            coming.clear()

        return Copied(Promise(self._receives[channel], arrive, self._timeout_s), here)

    def check(self) -> None:
        for thread in self._thread():
            thread.check()

    def _thread(self) -> list[BackgroundThread]:
        return [*self._sends.values(), *self._sent.values(), *self._receives.values()]

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        # Allocated for the stream that writes it, which then need not wait for the compute issued before.
        with torch.cuda.stream(self._in):
            tensor = new_tensor(shape, dtype, channels_last, self.world.device)
        tensor.record_stream(self._compute)
        return tensor

    def close(self) -> None:
        torch.cuda.synchronize()
        for thread in self._thread():
            thread.close(self._timeout_s)


class Copied:
    """The receipt of rows that a side stream copies to the card."""

    def __init__(self, promise: Promise, here: torch.cuda.Event) -> None:
        self._promise, self._here = promise, here

    def wait(self) -> None:
        self._promise.wait()
        torch.cuda.current_stream().wait_event(self._here)

    def is_done(self) -> bool:
        return self._promise.is_done()


def new_stream() -> torch.cuda.Stream:
    """A stream beside the one that computes, and before it: one of its own kind would queue behind what it issued."""
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    """An event that a thread waits for asleep, not spinning."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _pinned_like(tensor: Tensor) -> Tensor:
    """Pinned memory for a tensor that runs straight on; torch keeps such memory and gives it out again."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
