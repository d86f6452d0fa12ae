"""Rows from and to other stages: what a worker receives, puts together, and sends.

stage before ── transport ──▶ ┐ put together, in one tensor ──▶ the stage ──▶ kept until all have ── transport ──▶
on this very worker ────────▶ ┘                                               taken their rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from stagewright.errors import RunError
from stagewright.runtime.replica import Outbox, Replica
from stagewright.runtime.settings import Settings
from stagewright.runtime.stage import InFlight, Key
from stagewright.runtime.transport import Channel, Transport
from stagewright.schedule import Action, Kind


class Exchange:
    """The rows that a worker's replicas share with replicas of neighbouring stages, here and on other workers."""

    def __init__(self, worker: int, replicas: Mapping[int, Replica], transport: Transport, settings: Settings) -> None:
        self.worker, self.replicas, self.transport, self._settings = worker, replicas, transport, settings

    def is_ready(self, action: Action) -> bool:
        """Whether a forward or backward has all its rows."""
        here, key = self.replicas[action.stage], (action.batch, action.microbatch)
        is_forward = action.kind is Kind.FORWARD
        other = action.stage + (-1 if is_forward else 1)
        if not 0 <= other < len(here.plan.stages):
            return True
        partners, near = here.partners(other, action.microbatch), self.replicas.get(other)
        is_near = near is not None and self.worker in partners
        if near is not None and is_near and key not in (near.made if is_forward else near.returned):
            return False
        arriving = (here.activations if is_forward else here.gradients).get(key)
        return len(partners) == is_near or (arriving is not None and arriving.is_done())

    def inputs(self, here: Replica, key: Key) -> list[Tensor]:
        """A microbatch's inputs from the stage before."""
        before = self.replicas.get(here.stage - 1)
        return self._gather(here, here.stage - 1, key, here.activations, before.made if before else None)

    def output_gradients(self, here: Replica, key: Key) -> list[Tensor] | None:
        """The gradients of a microbatch's outputs from the stage after; None where the loss is."""
        if here.runner.has_loss:
            return None
        after = self.replicas.get(here.stage + 1)
        return self._gather(here, here.stage + 1, key, here.gradients, after.returned if after else None)

    def _gather(
        self, here: Replica, other: int, key: Key, in_flight: dict[Key, InFlight], near: Outbox | None
    ) -> list[Tensor]:
        """Rows that came over the wire, and those that the other stage has on this very worker."""
        arriving = in_flight.pop(key, None)
        rows = here.partners(other, key[1]).get(self.worker)
        if near is None or rows is None:
            if arriving is None:
                raise RunError(f"stage {here.stage} found no rows of microbatch {key[1]}: the schedule lacks a receipt")
            return arriving.wait()
        theirs = self.replicas[other].partners(here.stage, key[1])[self.worker]
        own = _rows_of(near.take(key), *theirs)
        if arriving is None:
            return own
        whole = arriving.wait()
        for target, part in zip(whole, own):
            target[rows[0] : rows[1]].copy_(part)
        return whole

    def keep_outputs(self, here: Replica, key: Key, outputs: Sequence[Tensor]) -> None:
        """Keeps a microbatch's outputs until the stage after has taken them."""
        here.made.put(key, [tensor.detach() for tensor in outputs], len(here.partners(here.stage + 1, key[1])))

    def keep_gradients(self, here: Replica, key: Key, gradients: list[Tensor]) -> None:
        """Keeps the gradients of a microbatch's inputs until the stage before has taken them."""
        takers = here.partners(here.stage - 1, key[1]) if here.stage else {}
        here.returned.put(key, gradients, len(takers))

    def receive(self, actions: Sequence[Action]) -> None:
        """Starts to receive the rows of a microbatch from several workers."""
        first = actions[0]
        is_forward = first.kind is Kind.RECEIVE_FORWARD
        other, stage = first.stage, first.stage + (1 if is_forward else -1)
        here = self.replicas[stage]
        arriving = self._in_flight(here, (first.batch, first.microbatch), is_forward)
        parts = self._parts(here, other, arriving.tensors, actions)
        arriving.receipts.append(self.transport.receive(Channel(min(stage, other), is_forward), parts))

    def send(self, actions: Sequence[Action]) -> None:
        """Sends the rows of a microbatch to several workers."""
        first = actions[0]
        is_forward = first.kind is Kind.SEND_FORWARD
        stage, other = first.stage, first.stage + (1 if is_forward else -1)
        here, key = self.replicas[stage], (first.batch, first.microbatch)
        tensors = (here.made if is_forward else here.returned).take(key, len(actions))
        parts = self._parts(here, other, tensors, actions)
        self.transport.send(Channel(min(stage, other), is_forward), parts)

    def _in_flight(self, here: Replica, key: Key, is_forward: bool) -> InFlight:
        """What the rows of a microbatch arrive in, made when the first of them is due."""
        in_flight, share = here.activations if is_forward else here.gradients, here.share(key[1])
        if key not in in_flight and share is not None:
            specs = here.runner.inputs if is_forward else here.runner.returned
            shapes = [((share.stop - share.start, *spec.shape_per_row), spec.dtype) for spec in specs]
            layout = self._settings.channels_last
            in_flight[key] = InFlight([self.transport.empty(shape, dtype, layout) for shape, dtype in shapes], [])
        return in_flight[key]

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
