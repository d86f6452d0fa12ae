"""Rows from and to other stages: what a worker receives, puts together, and sends.

stage before ── transport ──▶ ┐ put together, in one tensor ──▶ the stage ──▶ kept until all have ── transport ──▶
on this very worker ────────▶ ┘                                               taken their rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from stagewright.errors import RunError
from stagewright.runtime.background import Pending
from stagewright.runtime.replica import Replica
from stagewright.runtime.settings import Settings
from stagewright.runtime.stage import Key
from stagewright.runtime.transport import Channel, Transport
from stagewright.schedule import Action, Kind


@dataclass
class _Arriving:
    """Tensors for one microbatch that are being put together from several senders."""

    tensors: list[Tensor]
    receipts: list[Pending]

    def wait(self) -> list[Tensor]:
        for receipt in self.receipts:
            receipt.wait()
        return self.tensors


_Rows = tuple[int, bool, Key]
"""A stage, whether its rows go forward or back, and their microbatch."""


class Exchange:
    """The rows that a worker's replicas share with replicas of neighbouring stages, here and on other workers."""

    def __init__(
        self, worker: int, replicas: Mapping[int, Replica], transport: Transport, settings: Settings,
        length_of: Callable[[int], int | None],
    ) -> None:  # fmt: skip
        self.worker, self.replicas, self.transport = worker, replicas, transport
        self._channels_last, self._length_of = settings.channels_last, length_of
        self.arriving: dict[_Rows, _Arriving] = {}
        """What is on its way to a stage."""
        self.kept: dict[_Rows, tuple[list[Tensor], int]] = {}
        """What a stage has made, and how many neighbours have yet to take their rows of it."""

    def is_ready(self, action: Action) -> bool:
        """Whether a forward or backward has all its rows."""
        here, key = self.replicas[action.stage], (action.batch, action.microbatch)
        is_forward = action.kind is Kind.FORWARD
        other = action.stage + (-1 if is_forward else 1)
        if not 0 <= other < len(here.plan.stages):
            return True
        partners = here.partners(other, action.microbatch)
        is_near = self.worker in partners
        if is_near and (other, is_forward, key) not in self.kept:
            return False
        arriving = self.arriving.get((action.stage, is_forward, key))
        return len(partners) == is_near or (
            arriving is not None and all(receipt.is_completed() for receipt in arriving.receipts)
        )

    def get(self, here: Replica, key: Key, *, is_forward: bool) -> list[Tensor]:
        """A microbatch's inputs, or the gradients of its outputs: from other workers and from this very one."""
        other = here.stage + (-1 if is_forward else 1)
        arriving = self.arriving.pop((here.stage, is_forward, key), None)
        rows = here.partners(other, key[1]).get(self.worker)
        if rows is None:
            if arriving is None:
                raise RunError(f"stage {here.stage} found no rows of microbatch {key[1]}: the schedule lacks a receipt")
            return arriving.wait()
        theirs = self.replicas[other].partners(here.stage, key[1])[self.worker]
        own = _rows_of(self._take((other, is_forward, key), 1), *theirs)
        if arriving is None:
            return own
        whole = arriving.wait()
        for target, part in zip(whole, own):
            target[rows[0] : rows[1]].copy_(part)
        return whole

    def keep(self, here: Replica, key: Key, tensors: list[Tensor], *, is_forward: bool) -> None:
        """Keeps a microbatch's outputs, or the gradients of its inputs, until every neighbour has taken its rows."""
        other = here.stage + (1 if is_forward else -1)
        takers = here.partners(other, key[1]) if other >= 0 else ()
        if takers:
            self.kept[here.stage, is_forward, key] = (tensors, len(takers))

    def _take(self, rows: _Rows, num_takers: int) -> list[Tensor]:
        """What is kept for some takers; forgotten once the last one has it."""
        tensors, left = self.kept.pop(rows)
        if left > num_takers:
            self.kept[rows] = (tensors, left - num_takers)
        return tensors

    def receive(self, actions: Sequence[Action]) -> None:
        """Starts to receive the rows of a microbatch from several workers."""
        first, key = actions[0], (actions[0].batch, actions[0].microbatch)
        is_forward = first.kind is Kind.RECEIVE_FORWARD
        here = self.replicas[first.stage + (1 if is_forward else -1)]
        arriving = self.arriving.get((here.stage, is_forward, key))
        if arriving is None:
            shape, share = here.shapes[self._length_of(key[0])], here.shares[key[1]]
            specs = shape.inputs if is_forward else [spec for spec in shape.outputs if spec.needs_grad]
            rows = share.stop - share.start if share is not None else 0
            sizes = [((rows, *spec.shape_per_row), spec.dtype) for spec in specs]
            tensors = [self.transport.empty(size, dtype, self._channels_last) for size, dtype in sizes]
            arriving = self.arriving[here.stage, is_forward, key] = _Arriving(tensors, [])
        parts = self._parts(here, first.stage, arriving.tensors, actions)
        receipt = self.transport.receive(Channel(min(here.stage, first.stage), is_forward), parts)
        arriving.receipts.append(receipt)

    def send(self, actions: Sequence[Action]) -> None:
        """Sends the rows of a microbatch to several workers."""
        first, key = actions[0], (actions[0].batch, actions[0].microbatch)
        is_forward = first.kind is Kind.SEND_FORWARD
        here, other = self.replicas[first.stage], first.stage + (1 if is_forward else -1)
        tensors = self._take((here.stage, is_forward, key), len(actions))
        parts = self._parts(here, other, tensors, actions)
        self.transport.send(Channel(min(here.stage, other), is_forward), parts)

    def _parts(
        self, here: Replica, other: int, tensors: Sequence[Tensor], actions: Sequence[Action]
    ) -> list[tuple[int, list[Tensor]]]:
        """For each action its peer, and the rows that this replica shares with it."""
        partners = here.partners(other, actions[0].microbatch)
        lost = next((action for action in actions if action.peer not in partners), None)
        if lost is not None:
            raise RunError(f"{lost} moves no rows between worker {self.worker} and {lost.peer}")
        return [(action.peer, _rows_of(tensors, *partners[action.peer])) for action in actions]


def _rows_of(tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """The same rows of several tensors, as views."""
    if not tensors or (start == 0 and stop == tensors[0].size(0)):
        return list(tensors)
    return [tensor[start:stop] for tensor in tensors]
