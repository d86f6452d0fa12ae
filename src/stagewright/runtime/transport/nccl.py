"""Messages between cards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.plan import Plan
from stagewright.runtime.transport.channel import Channel, Parts, Receipt, new_tensor, on_the_wire
from stagewright.runtime.transport.gloo import channels_of
from stagewright.runtime.world import World


class NcclTransport:
    """Grouped messages between cards, one communicator a channel, in the schedule's order.

    A receive starts on the card when the compute issued before it is over, not at once: while it waits for its sender
    it occupies multiprocessors. Being issued one compute action ahead of its place, it overlaps with that one.
    """

    name = "NCCL"
    lookahead = 1

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.arrived: threading.Event = _Polled()
        self._groups: dict[Channel, dist.ProcessGroup | None] = {}
        for channel in channels_of(plan):
            members = tuple(sorted({*plan.workers[channel.stage], *plan.workers[channel.stage + 1]}))
            self._groups[channel] = world.group(f"{channel.stage}{channel.is_forward}", members)
            self._connect(channel, plan)

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

    def _issue(self, channel: Channel, parts: Parts, what: Callable[..., dist.Work | None]) -> list[dist.Work]:
        group = self._groups[channel]
        ops = [dist.P2POp(what, on_the_wire(tensor), peer, group) for peer, tensors in parts for tensor in tensors]
        return list(dist.batch_isend_irecv(ops))

    def send(self, channel: Channel, parts: Parts) -> None:
        self._issue(channel, parts, dist.isend)

    def receive(self, channel: Channel, parts: Parts) -> Receipt:
        return _OnStream(self._issue(channel, parts, dist.irecv))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
        return new_tensor(shape, dtype, channels_last, self.world.device)

    def close(self) -> None:
        torch.cuda.synchronize()


class _OnStream:
    """The receipt of what a card's stream will have received."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)


class _Polled(threading.Event):
    """An event for those who must look for themselves: waiting for it is a short nap."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(50e-6)
        return True
