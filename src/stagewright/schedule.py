"""One step, one worker's list of them, and all lists: what the simulator and the runtime both interpret.

A schedule is a loop. An order holds the actions of one turn, each with the batch that it belongs to, relative to the
turn: turn n of `F0.0+1 B0.0 U0` runs forward of batch n + 1, then backward and the update of batch n. Turns run from
before the first batch until after the last; actions on batches that do not exist are left out, so that a pipeline
fills and drains by itself:

    turn   −1  │ 0         │ 1         │ 2
            F0 │ F1 B0 U0  │ F2 B1 U1  │ B2 U2        (three batches)

A synchronous schedule has no offsets: one turn is one batch, with a flush at its end.

What the kinds mean, for the worker whose order holds them:

    F, B        forward; backward (gradients of inputs and of weights)
    I, W        backward in two halves: gradients of the inputs, gradients of the weights
    RF, RB      issue the receipt of activations from, or of gradients of them from, worker `peer`; never waits. The
                stage is the sender's here too: RF0.3<2 is what SF0.3>5 of worker 2 sends to worker 5, for its F1.3
    SF, SB      issue the sending of this stage's output, or of the gradient of its input, to `peer`; never waits
    G           issue the all-reduce (sum) of the stage's gradients, bucket by bucket; never waits. A bucket may start
                as soon as the batch's last backward of the stage has its gradients; G stands where that one is over
    A           all workers agree: on overflow, and on the norm of all gradients; before every update of the batch
    U           wait for the stage's reductions, then the optimizer step: version n + 1 comes from version n. Replicas
                that share out the optimizer's states then begin to give one another the weights; U never waits for them

F and B wait for what they need: receipts, and the stage before or after on the same worker (no transfer then).
Which version a forward or backward uses follows from its batch: n uses that of updates 0 … n − K.
Transfers between one pair of workers are issued in the same order at both ends. Stages with one replica have no G.

An order is written as a line, `F0.3` being forward of microbatch 3 in stage 0:

    F0.0+1 SF0.0>3+1 RB1.0<3 B0.0 G0 U0
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import PlainSerializer, PlainValidator

from stagewright.errors import ScheduleError, StagewrightError
from stagewright.plan import Plan
from stagewright.schema import Saved, schema


class Kind(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    REDUCE = "G"
    AGREE = "A"
    UPDATE = "U"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD})
TRANSFERS = SENDS | RECEIVES


class Action(NamedTuple):
    """One step of one worker."""

    kind: Kind
    stage: int
    """Whose forward, output, gradient …; −1 for an agreement, which all stages share."""
    batch: int = 0
    """Relative to the turn inside a schedule, absolute once unrolled."""
    microbatch: int = -1
    """−1 where the action is for the whole batch."""
    peer: int = -1
    """The other worker of a transfer."""

    def __str__(self) -> str:
        offset = f"{self.batch:+d}" if self.batch else ""
        if self.kind is Kind.AGREE:
            return f"A{offset}"
        text = f"{self.kind.value}{self.stage}"
        if self.microbatch >= 0:
            text += f".{self.microbatch}"
        if self.kind in TRANSFERS:
            text += f"{'>' if self.kind in SENDS else '<'}{self.peer}"
        return text + offset

    @classmethod
    def parse(cls, text: str) -> Self:
        """The action that `F0.3`, `SF0.3>5+1`, `G0`, `A` or `U0-1` writes."""
        match = _ACTION_TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(f"action {text[:40]!r} cannot be read: expected one like F0.3, RF1.3<2, G0, A or U0-1")
        kind = Kind(match["kind"])
        stage, microbatch, peer = (match[key] for key in ("stage", "microbatch", "peer"))
        arrow = ">" if kind in SENDS else "<" if kind in RECEIVES else None
        has = (stage is not None, microbatch is not None, match["arrow"])
        wants = (kind is not Kind.AGREE, kind in COMPUTE | TRANSFERS, arrow)
        if has != wants:
            raise ScheduleError(f"action {text!r}: {kind.name.lower()} is written like {_EXAMPLES[kind]}")
        number = [-1 if part is None else int(part) for part in (stage, microbatch, peer)]
        return cls(kind, number[0], int(match["batch"] or 0), number[1], number[2])


_ACTION_TEXT = re.compile(
    r"(?P<kind>SF|RF|SB|RB|[FBIWGAU])(?P<stage>\d{1,6})?(?:\.(?P<microbatch>\d{1,6}))?"
    r"(?:(?P<arrow>[<>])(?P<peer>\d{1,6}))?(?P<batch>[+-]\d{1,6})?",
    re.ASCII,
)
_EXAMPLES = {
    kind: str(Action(kind, -1 if kind is Kind.AGREE else 0, 0, 3 if kind in COMPUTE | TRANSFERS else -1, 2))
    for kind in Kind
}

Order = tuple[Action, ...]


def parse_order(text: str) -> Order:
    """The actions in a line of text, separated by blanks."""
    # Older files have a G for each bucket: of G0/0 G0/1 G0/2 the first counts.
    words = (word for word in text.split() if not re.search(r"^G\d+/0*[1-9]", word))
    return tuple(Action.parse(re.sub(r"^(G\d+)/0+", r"\1", word)) for word in words)


def format_order(order: Sequence[Action]) -> str:
    """The line that `parse_order` reads."""
    return " ".join(map(str, order))


def _checked_order(value: object) -> Order:
    """The order that a line of text or a sequence of actions is; looking at each field of each would take seconds."""
    if isinstance(value, str):
        return parse_order(value)
    if isinstance(value, (tuple, list)) and set(map(type, value)) <= {Action}:
        return tuple(value)
    raise ValueError("a line of actions such as 'F0.0 B0.0 U0'")


@schema(error=ScheduleError)
class Schedule(Saved):
    """A plan and, for each worker, the actions of one turn."""

    FORMAT: ClassVar[str] = "stagewright.schedule"
    ERROR: ClassVar[type[StagewrightError]] = ScheduleError

    plan: Plan
    orders: tuple[Annotated[Order, PlainValidator(_checked_order), PlainSerializer(format_order)], ...]
    agree: bool = False
    """Whether updates wait for the agreement of all workers (fp16, clipping)."""

    def __post_init__(self) -> None:
        if len(self.orders) != len(self.plan.devices):
            raise ScheduleError(
                f"the schedule has {len(self.orders)} orders, but the plan uses {len(self.plan.devices)} devices"
            )

    @cached_property
    def offsets(self) -> tuple[int, int]:
        """The smallest and the largest batch that a turn reaches, relative to itself."""
        batches = [action.batch for order in self.orders for action in order]
        return min(batches, default=0), max(batches, default=0)

    def unroll(self, worker: int, num_batches: int, first_batch: int = 0) -> Iterator[Action]:
        """One worker's actions over a run of batches, with absolute batches, lazily."""
        low, high = self.offsets
        order, stop = self.orders[worker], first_batch + num_batches
        if low == high == first_batch and num_batches == 1:
            yield from order
            return
        for turn in range(first_batch - high, stop - low):
            for kind, stage, offset, microbatch, peer in order:
                if first_batch <= turn + offset < stop:
                    yield Action(kind, stage, turn + offset, microbatch, peer)

    @property
    def num_batches_drawn(self) -> int:
        """Enough batches to see a loop fill, run and drain; one where every batch ends with a flush."""
        low, high = self.offsets
        return 1 if low == high else high - low + 2

    @property
    def text(self) -> str:
        """The orders as lines, worker by worker."""
        width = len(str(len(self.orders) - 1))
        return "\n".join(f"{worker:>{width}} │ {format_order(order)}" for worker, order in enumerate(self.orders))

    def grid(self, num_batches: int | None = None) -> str:
        """Compute and updates, a row a worker, as one draws them on paper; workers that do the same share a row.

        0-2 │ F0 F1 B0 U0 F2 B1 U1
        3   │ F0 B0 U0 F1 B1 U1
        """
        num_batches = self.num_batches_drawn if num_batches is None else num_batches
        rows = [" ".join(self.cells(worker, num_batches)) for worker in range(len(self.orders))]
        starts = [number for number, row in enumerate(rows) if number == 0 or row != rows[number - 1]]
        ends = [*starts[1:], len(rows)]
        labels = [str(start) if end == start + 1 else f"{start}-{end - 1}" for start, end in zip(starts, ends)]
        width = max(map(len, labels))
        return "\n".join(f"{label:<{width}} │ {rows[start]}".rstrip() for label, start in zip(labels, starts))

    def cells(self, worker: int, num_batches: int) -> Iterator[str]:
        """What `grid` writes for one worker."""
        for action in self.unroll(worker, num_batches):
            if action.kind in _DRAWN:
                yield self.cell(action, num_batches)

    def cell(self, action: Action, num_batches: int) -> str:
        """An unrolled action in short: `F3`, `2:F3` with its batch, `F1.3` where workers have several stages."""
        several_stages = len(self.plan.devices) < sum(self.plan.replicas)
        several_microbatches, several_batches = self.plan.num_microbatches > 1, num_batches > 1
        by_batch = several_batches and not several_microbatches
        number = str(action.batch) if by_batch else str(action.microbatch) if action.microbatch >= 0 else ""
        stage = str(action.stage) if several_stages and action.stage >= 0 else ""
        head = f"{action.batch}:" if several_batches and several_microbatches else ""
        return f"{head}{action.kind.value}{stage}{'.' if stage and number else ''}{number}"


_DRAWN = COMPUTE | {Kind.AGREE, Kind.UPDATE}
