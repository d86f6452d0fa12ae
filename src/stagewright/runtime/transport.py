"""Transfers between workers: rows of activations forward, rows of gradients back.

A channel is one boundary between stages in one direction. Transfers between two workers on one channel happen in
the order in which both issue them, so nothing but the rows themselves travels: shapes and types are known.

    workers on        transport
    CPUs              gloo      messages over sockets
    cards             nccl      grouped messages, card to card
    a shared card     staged    over sockets, staged in pinned memory
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.plan import Plan
from stagewright.policy import RULES
from stagewright.runtime.background import BackgroundThread, Pending, Several, new_event, new_stream
from stagewright.runtime.settings import Settings
from stagewright.runtime.world import World

STRANDS = 4
"""Groups of a staged channel, each with a socket thread of its own: one thread alone moves about 1 GB/s."""


class Channel(NamedTuple):
    """The boundary after `stage`, forward or backward."""

    stage: int
    is_forward: bool


_Parts = Sequence[tuple[int, Sequence[Tensor]]]
"""For each peer the tensors that go to it, or that its rows go into."""


class Transport(ABC):
    """A way to move rows."""

    name: str
    """What the log calls it."""
    lookahead = 2
    """How many compute actions ahead of their place receives are posted."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.arrived = threading.Event()
        """Set whenever something arrives, where anyone waits for that."""
        self._threads: list[BackgroundThread] = []
        self._ends = {
            Channel(stage, is_forward): (plan.workers[stage], plan.workers[stage + 1])[:: 1 if is_forward else -1]
            for stage in range(len(plan.stages) - 1)
            for is_forward in (True, False)
        }
        """For each channel the workers that send, and those that receive."""

    def _thread(self, name: str, wake: threading.Event | None = None) -> BackgroundThread:
        self._threads.append(BackgroundThread(name, self.world.timeout.total_seconds(), wake))
        return self._threads[-1]

    def _members(self, channel: Channel) -> tuple[int, ...]:
        sources, targets = self._ends[channel]
        return tuple(sorted({*sources, *targets}))

    @abstractmethod
    def send(self, channel: Channel, parts: _Parts) -> None:
        """Sends to each worker its tensors; returns at once."""

    @abstractmethod
    def receive(self, channel: Channel, parts: _Parts) -> Pending:
        """Receives from each worker into its tensors; returns at once."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        """A tensor to receive into."""
        layout = torch.channels_last if channels_last and len(shape) == 4 else torch.contiguous_format
        return torch.empty(tuple(shape), dtype=dtype, device=self.world.device, memory_format=layout)

    def check(self) -> None:
        """Raises what went wrong behind the worker's back."""
        for thread in self._threads:
            thread.check()

    def close(self) -> None:
        """Waits until everything sent has left."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        for thread in self._threads:
            thread.close()


def _messages(parts: _Parts) -> list[tuple[int, int, Tensor]]:
    """(peer, number, tensor) of every tensor, each as a view whose memory runs straight on."""
    return [(peer, number, _straight(tensor)) for peer, tensors in parts for number, tensor in enumerate(tensors)]


def _straight(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1)  # rows of a channels-last tensor as they lie
    return tensor.contiguous()


class _Gloo(Transport):
    """Messages over sockets, matched by their tags."""

    name = "gloo"

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world, plan)
        self._sent = self._thread("sends")
        watched = self._ends if RULES[plan.policy].by_arrival else ()
        self._waiters = {channel: self._thread(str(channel), self.arrived) for channel in watched}

    def _tag(self, channel: Channel, number: int) -> int:
        return number * len(self._ends) + 2 * channel.stage + channel.is_forward

    def send(self, channel: Channel, parts: _Parts) -> None:
        messages = _messages(parts)
        works = Several([dist.isend(rows, peer, tag=self._tag(channel, number)) for peer, number, rows in messages])

        def leave() -> None:
            works.wait()
            messages.clear()

        self._sent.add(leave)

    def receive(self, channel: Channel, parts: _Parts) -> Pending:
        messages = _messages(parts)
        works = Several([dist.irecv(rows, peer, tag=self._tag(channel, number)) for peer, number, rows in messages])
        return self._waiters[channel].promise(works.wait) if self._waiters else works


class _Nccl(Transport):
    """Grouped messages between cards, one communicator a channel, in the schedule's order.

    A receive starts on the card when the compute issued before it is over, not at once: while it waits for its sender
    it occupies multiprocessors. Being issued one compute action ahead of its place, it overlaps with that one.
    """

    name = "NCCL"
    lookahead = 1

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world, plan)
        self.arrived = _Polled()
        self._groups: dict[Channel, dist.ProcessGroup | None] = {}
        for channel, (sources, targets) in self._ends.items():
            self._groups[channel] = world.group(f"{channel.stage}{channel.is_forward}", self._members(channel))
            # Connected now: later, opening one would block a worker until its peer comes to it.
            one = torch.ones(1, device=world.device)
            receives = [(peer, [one.clone()]) for peer in sources if world.worker in targets and peer != world.worker]
            sends = [(peer, [one]) for peer in targets if world.worker in sources and peer != world.worker]
            self._issue(channel, sends, receives).wait()
            torch.cuda.synchronize()

    def _issue(self, channel: Channel, sends: _Parts, receives: _Parts) -> Several:
        group = self._groups[channel]
        ops = [dist.P2POp(dist.isend, rows, peer, group) for peer, _, rows in _messages(sends)]
        ops += [dist.P2POp(dist.irecv, rows, peer, group) for peer, _, rows in _messages(receives)]
        return Several(dist.batch_isend_irecv(ops) if ops else ())

    def send(self, channel: Channel, parts: _Parts) -> None:
        self._issue(channel, parts, ())

    def receive(self, channel: Channel, parts: _Parts) -> Pending:
        return self._issue(channel, (), parts)


class _Polled(threading.Event):
    """An event for those who must look for themselves: waiting for it is a short nap."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(50e-6)
        return True


class _Staged(Transport):
    """Messages between cards by way of the hosts' memory.

        card ──copy──▶ pinned memory ──socket──▶ pinned memory ──copy──▶ card
             side stream             gloo                     side stream

    Nothing here runs on a multiprocessor, and nothing on the card waits for a peer: the rows of a receive are copied to
    the card when they have come. So workers that share a card cannot keep each other from computing, as receives that
    spin inside a kernel can.
    """

    name = "gloo through pinned memory"

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world, plan)
        self._compute = torch.cuda.current_stream()
        self._out, self._in = new_stream(), new_stream()
        self._strands = {
            channel: [world.group(f"{channel} {strand}", self._members(channel), "gloo") for strand in range(STRANDS)]
            for channel in self._ends
        }
        self._sends = {channel: self._thread(f"{channel} sends") for channel in self._ends}
        self._sent = {channel: self._thread(f"{channel} sent") for channel in self._ends}
        self._receives = {channel: self._thread(f"{channel} receives", self.arrived) for channel in self._ends}

    def _strand(self, channel: Channel, peer: int) -> dist.ProcessGroup | None:
        return self._strands[channel][(peer + self.world.worker) % STRANDS]

    def send(self, channel: Channel, parts: _Parts) -> None:
        made, copied = new_event(), new_event()
        made.record()
        messages, pinned = _messages(parts), []
        with torch.cuda.stream(self._out):
            self._out.wait_event(made)
            for peer, number, rows in messages:
                pinned.append((peer, number, _pinned_like(rows).copy_(rows, non_blocking=True)))
            copied.record()

        def leave() -> None:
            copied.synchronize()
            messages.clear()
            works = Several(
                [dist.isend(rows, peer, self._strand(channel, peer), tag=number) for peer, number, rows in pinned]
            )

            def let_go() -> None:
                works.wait()
                pinned.clear()

            self._sent[channel].add(let_go)

        self._sends[channel].add(leave)

    def receive(self, channel: Channel, parts: _Parts) -> Pending:
        coming = []
        for peer, number, rows in _messages(parts):
            pinned = _pinned_like(rows)
            work = dist.irecv(pinned, peer, self._strand(channel, peer), tag=number)
            coming.append((Several([work]), pinned, rows))
        copied = new_event()

        def arrive() -> None:
            with torch.cuda.stream(self._in):
                for work, pinned, rows in coming:
                    work.wait()
                    rows.copy_(pinned, non_blocking=True)
                copied.record()
            coming.clear()

        return self._receives[channel].promise(arrive, copied)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        # Allocated for the stream that writes it, which then need not wait for the compute issued before.
        with torch.cuda.stream(self._in):
            tensor = super().empty(shape, dtype, channels_last)
        tensor.record_stream(self._compute)
        return tensor


def _pinned_like(tensor: Tensor) -> Tensor:
    """Pinned memory for a tensor that runs straight on; torch keeps such memory and gives it out again."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


TRANSPORTS: Mapping[str, type[Transport]] = {"gloo": _Gloo, "nccl": _Nccl, "staged": _Staged}


def make_transport(world: World, plan: Plan, settings: Settings) -> Transport:
    """The transport for these workers' devices, unless the settings name one."""
    among_cards = "staged" if world.is_staged(settings) else "nccl"
    return TRANSPORTS[among_cards if world.device.type == "cuda" else "gloo"](world, plan)
