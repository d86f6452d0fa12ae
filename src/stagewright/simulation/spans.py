"""The spans of a run: every action with its times; a transfer is shown at both ends, a reduction at every replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from stagewright.record import Columns, Span, Spans
from stagewright.schedule import Action, Kind
from stagewright.simulation.log import Log, Mapped
from stagewright.simulation.program import Program

_RECEIPTS: Mapping[Kind, str] = {Kind.SEND_FORWARD: "RF", Kind.SEND_BACKWARD: "RB"}


def make_spans(program: Program, log: Log) -> Spans:
    """All spans of a run, of which none is made before they are read."""
    return Spans(_computed(log), *_moved(program, log), _reduced(program, log))


def _computed(log: Log) -> Columns:
    """What took time on devices."""
    _, actions, batches, starts_s, stops_s, edges = log.done_columns
    kinds, stages, microbatches = _columns_of(actions)
    workers = [worker for worker, here in enumerate(edges) for _ in range(here.start, here.stop)]
    return workers, kinds, stages, batches, microbatches, starts_s, stops_s, [-1] * len(actions)


def _moved(program: Program, log: Log) -> Iterator[Columns]:
    """Transfers, at their sources and then at their targets."""
    channels, _, sent, batches, _, _, starts_s, stops_s = log.moved_columns
    sources, targets = (Mapped([one[at] for one in program.channels].__getitem__, channels) for at in (0, 1))
    kinds, stages, microbatches = _columns_of(sent)
    yield sources, kinds, stages, batches, microbatches, starts_s, stops_s, targets
    receipts, others = Mapped(lambda action: _RECEIPTS[action.kind], sent), Mapped(_other_stage, sent)
    yield targets, receipts, others, batches, microbatches, starts_s, stops_s, sources


def _reduced(program: Program, log: Log) -> Columns:
    """Reductions, at each replica."""
    rows = (
        (worker, "G", stage, batch, -1, start_s, stop_s, bucket)
        for stage, batch, bucket, start_s, stop_s, _ in log.reduced
        for worker in program.plan.workers[stage]
    )
    return tuple(zip(*rows)) or ((),) * len(Span._fields)


def _columns_of(actions: Sequence[Action]) -> Columns:
    """Kinds, stages and microbatches of actions."""
    return tuple(Mapped(attrgetter(field), actions) for field in ("kind.value", "stage", "microbatch"))


def _other_stage(sent: Action) -> int:
    """The stage that uses what is sent."""
    return sent.stage + (1 if sent.kind is Kind.SEND_FORWARD else -1)
