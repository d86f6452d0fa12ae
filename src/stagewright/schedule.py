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
    RF, RB      issue the receipt of activations from, or of gradients of them from, worker `peer`; never waits
    SF, SB      issue the sending of this stage's output, or of the gradient of its input, to `peer`; never waits
    G           issue the all-reduce (sum) of bucket `peer` of the stage's gradients; never waits. A bucket may start as
                soon as the batch's last backward of the stage has its gradients; G stands where that backward is over
    A           all workers agree: on overflow, and on the norm of all gradients; before every update of the batch
    U           wait for the stage's reductions, then the optimizer step: version n + 1 comes from version n
    V           from here on, new forwards of the stage use the version that `U` of the same batch made
    D           the version that this batch used is needed no more

F and B wait for what they need: receipts, and the stage before or after on the same worker (no transfer then).
Transfers between one pair of workers are issued in the same order at both ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar, NamedTuple, Self

from pydantic import BeforeValidator, PlainSerializer

from stagewright.errors import ScheduleError, StagewrightError
from stagewright.noun import Saved, noun
from stagewright.plan import Plan


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
    SWITCH = "V"
    RELEASE = "D"


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
    """The other worker of a transfer; the bucket of a reduction."""

    def __str__(self) -> str:
        offset = f"{self.batch:+d}" if self.batch else ""
        if self.kind is Kind.AGREE:
            return f"A{offset}"
        text = f"{self.kind.value}{self.stage}"
        if self.microbatch >= 0:
            text += f".{self.microbatch}"
        if self.kind in TRANSFERS:
            text += f"{'>' if self.kind in SENDS else '<'}{self.peer}"
        elif self.kind is Kind.REDUCE:
            text += f"/{self.peer}"
        return text + offset

    @classmethod
    def parse(cls, text: str) -> Self:
        """The action that `F0.3`, `SF0.3>5+1`, `G0/2`, `A` or `U0-1` writes."""
        match = ACTION_TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"action {text[:40]!r} cannot be read: expected one like F0.3, RF1.3<2, G0/1, A or U0-1"
            )
        kind = Kind(match["kind"])
        stage, microbatch, peer, bucket = (match[key] for key in ("stage", "microbatch", "peer", "bucket"))
        arrow = ">" if kind in SENDS else "<" if kind in RECEIVES else None
        has = (stage is not None, microbatch is not None, match["arrow"], bucket is not None)
        wants = (kind is not Kind.AGREE, kind in COMPUTE | TRANSFERS, arrow, kind is Kind.REDUCE)
        if has != wants:
            raise ScheduleError(f"action {text!r}: {kind.name.lower()} is written like {EXAMPLES[kind]}")
        number = [-1 if part is None else int(part) for part in (stage, microbatch, peer if peer else bucket)]
        return cls(kind, number[0], int(match["batch"] or 0), number[1], number[2])


ACTION_TEXT = re.compile(
    r"(?P<kind>SF|RF|SB|RB|[FBIWGAUVD])(?P<stage>\d{1,6})?(?:\.(?P<microbatch>\d{1,6}))?"
    r"(?:(?P<arrow>[<>])(?P<peer>\d{1,6})|/(?P<bucket>\d{1,6}))?(?P<batch>[+-]\d{1,6})?",
    re.ASCII,
)
EXAMPLES = {
    kind: str(Action(kind, -1 if kind is Kind.AGREE else 0, 0, 3 if kind in COMPUTE | TRANSFERS else -1, 2))
    for kind in Kind
}

Order = tuple[Action, ...]


def parse_order(text: str) -> Order:
    """The actions in a line of text, separated by blanks."""
    return tuple(map(Action.parse, text.split()))


def format_order(order: Sequence[Action]) -> str:
    """The line that `parse_order` reads."""
    return " ".join(map(str, order))


def _order_from_text(value: object) -> object:
    return parse_order(value) if isinstance(value, str) else value


def version_of(batch: int, versions: int) -> int:
    """How many updates the weights have seen that a batch uses: those of batches 0 … batch − versions."""
    return max(0, batch - versions + 1)


@noun(error=ScheduleError)
class Schedule(Saved):
    """A plan and, for each worker, the actions of one turn."""

    FORMAT: ClassVar[str] = "stagewright.schedule"
    ERROR: ClassVar[type[StagewrightError]] = ScheduleError

    plan: Plan
    orders: tuple[Annotated[Order, BeforeValidator(_order_from_text), PlainSerializer(format_order)], ...]
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
        for turn in range(first_batch - high, stop - low):
            for action in order:
                if first_batch <= turn + action.batch < stop:
                    yield action._replace(batch=turn + action.batch)
