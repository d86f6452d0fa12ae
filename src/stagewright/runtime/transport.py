"""Transfers between workers: rows of activations forward, rows of gradients back.

A channel is one boundary between stages in one direction. Transfers between two workers on one channel happen in
the order in which both issue them, so nothing but the rows themselves travels: shapes and types are known.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.errors import RunError
from stagewright.plan import Plan
from stagewright.runtime.world import World


class Channel(NamedTuple):
    """The boundary after `stage`, forward or backward."""

    stage: int
    is_forward: bool


class Receipt(Protocol):
    """A transfer on its way to this worker."""

    def wait(self) -> None:
        """Returns when what follows on this worker (or on its stream) may read the rows."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""


class Transport(Protocol):
    """A way to move rows."""

    lookahead: int
    """How many compute actions ahead of their place receives are posted."""
    arrived: threading.Event
    """Set whenever something arrives, where anyone waits for that."""

    def check(self) -> None:
        """Raises what went wrong behind the worker's back."""

    def send(self, channel: Channel, parts: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        """Sends to each worker its tensors; returns at once."""

    def receive(self, channel: Channel, parts: Sequence[tuple[int, Sequence[Tensor]]]) -> Receipt:
        """Receives from each worker into its tensors; returns at once."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        """A tensor to receive into."""

    def close(self) -> None:
        """Waits until everything sent has left."""


def on_the_wire(tensor: Tensor) -> Tensor:
    """A view whose memory runs straight on: rows of a channels-last tensor as they lie."""
    if tensor.is_contiguous():
        return tensor
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1)
    return tensor.contiguous()


class Done:
    """The receipt of what is already here."""

    def wait(self) -> None:
        return None

    def is_done(self) -> bool:
        return True


class _Parts:
    """The receipt of several messages on the CPU."""

    def __init__(self, works: Sequence[dist.Work], waiter: Waiter | None) -> None:
        self.works = works
        self.done = threading.Event() if waiter else None
        if waiter:
            waiter.add(works, self.done)

    def wait(self) -> None:
        if self.done is not None:
            self.done.wait()
            return
        for work in self.works:
            work.wait()

    def is_done(self) -> bool:
        return self.done is not None and self.done.is_set()


class Waiter:
    """A thread that waits for messages in their order, so that the worker itself never has to."""

    def __init__(self, name: str, wake: threading.Event | None = None) -> None:
        self.failure: BaseException | None = None
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Sequence[dist.Work], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, works: Sequence[dist.Work], then: object) -> None:
        """Waits for these next; keeps `then` alive until they are through and sets it if it is an event."""
        if self.failure is not None:
            raise self.failure
        self._jobs.put((works, then))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            works, then = job
            try:
                for work in works:
                    work.wait()
            except BaseException as failure:  # it is shown by the worker, which is another thread
                self.failure = self.failure or failure
            if isinstance(then, threading.Event):
                then.set()
            if self._wake is not None:
                self._wake.set()
            del job, works, then

    def close(self, timeout_s: float) -> None:
        """Waits until all is through."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RunError(f"sent rows were not taken within {timeout_s:g} s", "look for the worker that stopped")
        if self.failure is not None:
            raise self.failure


class GlooTransport:
    """Messages between CPU workers, matched by their tags."""

    lookahead = 2

    def __init__(self, world: World, plan: Plan, *, threads_wait: bool = False) -> None:
        self.world = world
        self.arrived = threading.Event()
        self._sent = Waiter("sends")
        channels = [Channel(stage, way) for stage in range(len(plan.stages) - 1) for way in (True, False)]
        self._number = {channel: number for number, channel in enumerate(channels)}
        self._waiters = {channel: Waiter(str(channel), self.arrived) for channel in channels if threads_wait}

    def _tag(self, channel: Channel, tensor: int) -> int:
        return tensor * len(self._number) + self._number[channel]

    def send(self, channel: Channel, parts: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        kept = [(peer, [on_the_wire(tensor) for tensor in tensors]) for peer, tensors in parts]
        works = [
            dist.isend(tensor, peer, tag=self._tag(channel, number))
            for peer, tensors in kept
            for number, tensor in enumerate(tensors)
        ]
        self._sent.add([work for work in works if work is not None], kept)

    def receive(self, channel: Channel, parts: Sequence[tuple[int, Sequence[Tensor]]]) -> Receipt:
        works = [
            dist.irecv(on_the_wire(tensor), peer, tag=self._tag(channel, number))
            for peer, tensors in parts
            for number, tensor in enumerate(tensors)
        ]
        return _Parts([work for work in works if work is not None], self._waiters.get(channel))

    def check(self) -> None:
        for waiter in (self._sent, *self._waiters.values()):
            if waiter.failure is not None:
                raise waiter.failure

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        return new_tensor(shape, dtype, channels_last, self.world.device)

    def close(self) -> None:
        for waiter in (self._sent, *self._waiters.values()):
            waiter.close(self.world.timeout.total_seconds())


class _OnStream:
    """The receipt of what a card's stream will have received."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Polled(threading.Event):
    """An event for those who must look for themselves: waiting for it is a short nap."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(50e-6)
        return True


class NcclTransport:
    """Grouped messages between cards, one communicator a channel, in the schedule's order.

    A receive starts on the card when the compute issued before it is over, not at once: while it waits for its sender
    it occupies multiprocessors. Being issued one compute action ahead of its place, it overlaps with that one.
    """

    lookahead = 1

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.arrived: threading.Event = Polled()
        self._groups: dict[Channel, dist.ProcessGroup | None] = {}
        for stage in range(len(plan.stages) - 1):
            members = tuple(sorted({*plan.workers[stage], *plan.workers[stage + 1]}))
            for way in (True, False):
                self._groups[Channel(stage, way)] = world.group(f"{stage}{way}", members)
                self._connect(Channel(stage, way), plan)

    def _connect(self, channel: Channel, plan: Plan) -> None:
        """Opens the channel's connections now: later, opening one would block a worker until its peer comes to it."""
        ends = (plan.workers[channel.stage], plan.workers[channel.stage + 1])
        sources, targets = ends if channel.is_forward else ends[::-1]
        own, group = self.world.worker, self._groups[channel]
        ones = torch.ones(1, device=self.world.device)
        ops = [dist.P2POp(dist.isend, ones, peer, group) for peer in targets if own in sources and peer != own]
        ops += [dist.P2POp(dist.irecv, ones.clone(), peer, group) for peer in sources if own in targets and peer != own]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        torch.cuda.synchronize()

    def check(self) -> None:
        return None

    def _issue(
        self, channel: Channel, parts: Sequence[tuple[int, Sequence[Tensor]]], what: Callable[..., dist.Work | None]
    ) -> list[dist.Work]:
        group = self._groups[channel]
        ops = [dist.P2POp(what, tensor, peer, group) for peer, tensors in parts for tensor in tensors]
        return list(dist.batch_isend_irecv(ops))

    def send(self, channel: Channel, parts: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        kept = [(peer, [on_the_wire(tensor) for tensor in tensors]) for peer, tensors in parts]
        self._issue(channel, kept, dist.isend)

    def receive(self, channel: Channel, parts: Sequence[tuple[int, Sequence[Tensor]]]) -> Receipt:
        flat = [(peer, [on_the_wire(tensor) for tensor in tensors]) for peer, tensors in parts]
        return _OnStream(self._issue(channel, flat, dist.irecv))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        return new_tensor(shape, dtype, channels_last, self.world.device)

    def close(self) -> None:
        torch.cuda.synchronize()


def new_tensor(shape: Sequence[int], dtype: torch.dtype, channels_last: bool, device: torch.device) -> Tensor:
    """An uninitialised tensor in the wanted layout."""
    layout = torch.channels_last if channels_last and len(shape) == 4 else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=layout)


def make_transport(world: World, plan: Plan) -> Transport:
    """The transport for these workers' devices."""
    if world.device.type == "cuda":
        return NcclTransport(world, plan)
    return GlooTransport(world, plan, threads_wait=plan.policy == "dynamic")
