"""Transfers: both ends of a channel issue them, and they run one after the other.

worker 0   F0 ──▶ SF issued ─────────────┐
channel    ........................ flow ─────▶ arrival
worker 1   RF issued, F waits ···························▶ F0
"""

from __future__ import annotations

from typing import Any

from stagewright.errors import SimulationError
from stagewright.policy import RULES
from stagewright.schedule import Action
from stagewright.simulation.events import Events, Worker
from stagewright.simulation.program import Op, Program
from stagewright.simulation.traffic import Flow, Traffic


class _Lane:
    """A channel's state: what its two ends have issued, and whether a transfer is under way."""

    __slots__ = ("busy", "flow", "latency_s", "number", "posted", "sent", "target")

    def __init__(self, number: int, latency_s: float, flow: Flow, target: Worker) -> None:
        self.number, self.latency_s, self.flow, self.target = number, latency_s, flow, target
        # Mostly empty or of one entry: lists, for a deque keeps room for 64, and thousands of those leave the caches.
        self.sent: list[tuple[Op, Action, int, float]] = []
        self.posted: list[tuple[Action, int, float, int]] = []
        self.busy = False


_Load = tuple[_Lane, Op, Action, int, float, float, float, int]
"""A transfer under way: its lane, what is sent, of which batch, when sent, posted and started, the slot it fills."""


class Transfers:
    """The channels of one run, and what has landed."""

    def __init__(self, program: Program, workers: list[Worker], events: Events, traffic: Traffic) -> None:
        self.program, self.workers, self.events, self.traffic = program, workers, events, traffic
        self.num_slots = max(len(program.slot_bytes), 1)
        self.wakes_all = RULES[program.plan.policy].by_arrival
        self.moved: list[Any] = []
        self.missing: dict[int, int] = {}
        """How many receipts a slot of a batch still waits for."""
        self.landing: dict[int, tuple[float, int]] = {}
        """When the last of a slot's rows is there, which nobody has used yet, and the number of that transfer."""
        self.lanes: list[_Lane] = []
        for number, one in enumerate(program.channels):
            flow = traffic.make_flow(one.loads, one.bytes_per_s, over=self.arrive)
            self.lanes.append(_Lane(number, one.latency_s, flow, workers[one.target]))

    def has_rows(self, worker: Worker, action: Action, batch: int, key: int) -> bool:
        """Whether all receipts of a slot have landed; if not, the worker waits for them."""
        if key in self.missing:
            worker.wait, worker.head = key, (action, batch)
            return False
        time_s, number = self.landing.pop(key)
        if time_s > self.events.now_s:
            worker.cause = ("transfer", number)
            self.events.at(time_s, worker.go_on)
            return False
        return True

    def issue(self, op: Op, action: Action, batch: int) -> None:
        """Issues a sending or a receipt."""
        lane, now_s = self.lanes[op.channel], self.events.now_s
        if op.slot < 0:  # a sending fills none
            lane.sent.append((op, action, batch, now_s))
        else:
            key = op.slot + action.microbatch + batch * self.num_slots
            self.missing[key] = self.missing.get(key, 0) + 1
            lane.posted.append((action, batch, now_s, key))
        if lane.sent and lane.posted and not lane.busy:
            self.pair_up(lane)

    def pair_up(self, lane: _Lane) -> None:
        """Starts the next transfer of a channel that is free and whose ends have both issued it."""
        op, sent, batch, sent_s = lane.sent.pop(0)
        received, other, posted_s, key = lane.posted.pop(0)
        if batch != other or sent.microbatch != received.microbatch:
            raise SimulationError(
                f"worker {self.program.channels[lane.number].source} sends {sent} of batch {batch} while worker "
                f"{lane.target.number} receives {received} of batch {other}",
                "both ends of a pair must issue their transfers in the same order: check the schedule",
            )
        flow, num_bytes, now_s = lane.flow, op.num_bytes, self.events.now_s
        load = (lane, op, sent, batch, sent_s, posted_s, now_s, key)
        if num_bytes and flow.loads:
            lane.busy, flow.load = True, load
            self.traffic.start(flow, num_bytes, now_s)
        else:
            self.land(load)

    def arrive(self, load: _Load) -> None:
        """A flow is over; the latency follows."""
        self.land(load)
        lane = load[0]
        lane.busy = False
        if lane.sent and lane.posted:
            self.pair_up(lane)

    def land(self, load: _Load) -> None:
        """A transfer arrives after its latency: whoever waits for it, or will, may go on then."""
        lane, op, sent, batch, sent_s, posted_s, start_s, key = load
        target, missing, number = lane.target, self.missing, len(self.moved)
        stop_s = self.events.now_s + lane.latency_s
        self.moved.append((lane.number, op, sent, batch, sent_s, posted_s, start_s, stop_s))
        left = missing.pop(key) - 1
        if left or key in self.landing:
            stop_s, number = self.landing[key] = max(self.landing.get(key, (0.0, 0)), (stop_s, number))
        if left:
            missing[key] = left
        elif target.wait == key:
            target.wait, target.cause = None, ("transfer", number)
            self.events.at(stop_s, target.go_on)
        else:
            self.landing[key] = (stop_s, number)
            if self.wakes_all:
                self.events.at(stop_s, target.go_on)
