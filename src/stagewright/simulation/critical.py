"""The critical path in words: walking back from the last update through what each action waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from stagewright.cluster import format_devices
from stagewright.simulation.events import SAME_MOMENT
from stagewright.simulation.log import Done, Log, Moved
from stagewright.simulation.program import Program

_LINK_WORDS: Mapping[str, str] = {
    "PIX": "a PCIe switch", "PXB": "PCIe switches", "PHB": "the host bridge", "NODE": "the host bridges",
    "SYS": "the socket link", "NET": "the network", "IB": "the network", "local": "the local link",
}  # fmt: skip
_Before = tuple[int, int, float] | None
"""What something waited for: a worker, the number of its action, and until when that counts; None: nothing more."""


class Path:
    """Where the time between two moments went, on the chain of waits that ends with the last update."""

    def __init__(self, program: Program, log: Log, start_s: float, stop_s: float) -> None:
        self.program, self.log, self.start_s, self.stop_s = program, log, start_s, stop_s
        self.seconds: dict[str, float] = {}
        self.stops = [log.done_columns.stops_s[here] for here in log.done_columns.edges]
        found: _Before = self.last_update()
        while found is not None and found[2] > start_s:
            worker, at, until_s = found
            entry = log.done[worker][at]
            what = "update" if entry.is_update else "compute"
            self.add(f"{what} of stage {entry.action.stage}", entry.start_s, until_s)
            found = self.before(worker, at, entry)

    def add(self, what: str, start_s: float, stop_s: float) -> None:
        """Counts a stretch, as far as it lies between the two moments."""
        length = min(stop_s, self.stop_s) - max(start_s, self.start_s)
        if length > 0:
            self.seconds[what] = self.seconds.get(what, 0.0) + length

    def last_update(self) -> _Before:
        """The update that ends the stretch."""
        found, best = (0, len(self.log.done[0]) - 1, self.log.done[0][-1].stop_s), -1.0
        for worker, entries in enumerate(self.log.done):
            at = self.ended_by(worker, self.stop_s)
            while at > 0 and not entries[at].is_update:
                at -= 1
            if at >= 0 and entries[at].stop_s > best:
                best = entries[at].stop_s
                found = worker, at, best
        return found

    def ended_by(self, worker: int, time_s: float) -> int:
        """The last thing that a worker had finished by then; −1: nothing."""
        return bisect_right(self.stops[worker], time_s * (1 + SAME_MOMENT)) - 1

    def before(self, worker: int, at: int, entry: Done) -> _Before:
        """What the start of an action waited for."""
        if entry.cause is None:
            return (worker, at - 1, entry.start_s) if at > 0 else None
        kind, number = entry.cause
        if kind == "transfer":
            return self.before_transfer(number, entry)
        if kind == "reduction":
            return self.before_reduction(number, entry)
        if kind == "data":
            return self.before_data(worker, at, number)
        return self.on(number, entry.start_s, entry)

    def on(self, worker: int, time_s: float, waiting: Done) -> _Before:
        """The worker's action that was over, or under way, at a time, and began before the one that waits."""
        at = self.ended_by(worker, time_s)
        entries = self.log.done[worker]
        if at + 1 < len(entries) and entries[at + 1].start_s < time_s:
            at += 1
        while at >= 0 and entries[at].order >= waiting.order:
            at -= 1
        return (worker, at, min(time_s, entries[at].stop_s)) if at >= 0 else None

    def before_transfer(self, number: int, waiting: Done) -> _Before:
        """Through a transfer, and those before it on its channel, to the end that issued it last."""
        until_s = waiting.start_s
        later: int | None = number
        found = None
        while later is not None and until_s > self.start_s:
            moved = self.log.moved[later]
            self.add(self.transfer_words(moved), moved.start_s, until_s)
            until_s, channel = moved.start_s, self.program.channels[moved.channel]
            if moved.sent_s >= moved.start_s:
                return self.on(channel.source, moved.start_s, waiting)
            found = self.on(channel.target, moved.start_s, waiting)
            if found is not None and found[2] >= moved.start_s * (1 - SAME_MOMENT):
                return found
            # Neither end was late, so the channel was still busy with the transfer before.
            earlier = range(later - 1, -1, -1)
            later = next((n for n in earlier if self.log.plain_moved[n][0] == moved.channel), None)
        return found

    def before_reduction(self, number: int, waiting: Done) -> _Before:
        """Through the buckets that were reduced one after the other, to the backward that the first waited for."""
        until_s, last = waiting.start_s, self.log.reduced[number].last
        stage = self.log.reduced[number].stage
        what = f"all-reduce of stage {stage} among {format_devices(self.program.plan.stages[stage].devices)}"
        for earlier in range(number, -1, -1):
            entry = self.log.reduced[earlier]
            if entry.stage != stage:
                continue
            if entry.stop_s < until_s * (1 - SAME_MOMENT) and earlier != number:
                break
            self.add(what, entry.start_s, until_s)
            until_s, last = entry.start_s, entry.last
            if until_s <= self.start_s:
                return None
        return self.on(last, until_s, waiting)

    def before_data(self, worker: int, at: int, host: int) -> _Before:
        """Decoding runs one batch ahead: it goes back to the forward of the batch before."""
        entries = self.log.done[worker]
        here = entries[at]
        same = (n for n in range(at - 1, -1, -1) if entries[n].action is here.action)
        last = next(same, None)
        begin_s = 0.0 if last is None else entries[last].start_s
        self.add(f"data loading of host {host}", begin_s, here.start_s)
        return None if last is None else (worker, last, begin_s)

    def transfer_words(self, moved: Moved) -> str:
        """`transfer 0 → 1 over the host bridge`."""
        stage = moved.sent.stage
        channel = self.program.channels[moved.channel]
        other = stage + 1 if channel.forward else stage - 1
        rates, wires = self.program.costs.network.rates, self.program.costs.cluster.wires
        slowest = min(channel.loads, key=lambda load: rates[load[0]] / load[1], default=None)
        if slowest is not None and slowest[0] >= 2 * len(wires):
            return f"transfer {stage} → {other}, by the CPU"
        kind = "nothing" if slowest is None else wires[slowest[0] // 2].kind
        return f"transfer {stage} → {other} over {'NVLink' if kind.startswith('NV') else _LINK_WORDS.get(kind, kind)}"
