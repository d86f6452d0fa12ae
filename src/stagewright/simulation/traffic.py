"""Flows over links: every flow gets its max-min fair rate, anew whenever one starts or stops.

A flow loads each of its links with a number of edges (1 for a transfer, more where a ring crosses a link often), and
all edges on a link get the same rate unless something else holds them back:

    A ─┐ 10 B/s              A → C and B → C share C's link: 5 B/s each.
    B ─┴─ hub ─── C          D → C at 2 B/s, held back by its own link, would leave 4 B/s to each of them.

Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2: progressive filling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

Loads = tuple[tuple[int, int], ...]
"""(directed link, edges on it), link by link."""
_Over = Callable[[Any], object]


class Flow:
    """What carries bytes over some links, again and again: what is left of them, the rate, when they would arrive."""

    __slots__ = ("alone", "left_bytes", "load", "loads", "number", "over", "rate", "shared", "since_s", "stop_s")

    def __init__(self, number: int, loads: Loads, alone: float, over: _Over | None) -> None:
        self.number, self.loads, self.alone, self.over = number, loads, alone, over
        self.shared = loads
        """The loads that another flow can get in the way of."""
        self.left_bytes = self.rate = self.since_s = self.stop_s = 0.0
        self.load: Any = None
        """What its bytes are, for whoever started it."""


class Traffic:
    """The flows under way; `at(time_s, flow)` hears when a flow will be over, and again whenever that changes."""

    def __init__(self, rates: Sequence[float], at: Callable[[float, Flow], None]) -> None:
        self.rates, self.at = rates, at
        self.flows: list[Flow] = []
        self._on_link: list[dict[Flow, int]] = [{} for _ in rates]
        self._touched: dict[int, None] = {}
        self._known: dict[tuple[int, ...], dict[Flow, float]] = {}

    def make_flow(self, loads: Loads, alone: float, over: _Over | None = None) -> Flow:
        """A flow that does not run yet: `alone` is its rate on empty links.

        `over` is called with what it carried each time when all of it is there.
        """
        self.flows.append(Flow(len(self.flows) + 1, loads, alone, over))
        return self.flows[-1]

    def leave_out(self) -> None:
        """Of all flows' loads, leaves those out that never decide how links are shared; none may run yet."""
        for flow, shared in zip(self.flows, shared_loads([flow.loads for flow in self.flows], self.rates)):
            flow.shared = shared

    def start(self, flow: Flow, num_bytes: float, now_s: float) -> None:
        """Gives a flow bytes to carry; if it shares links now, it moves from the next `settle` on."""
        flow.left_bytes = num_bytes
        shares, on_links = False, self._on_link
        for link, edges in flow.shared:
            on_link = on_links[link]
            if on_link:
                shares = True
            on_link[flow] = edges
        if shares:
            self._touched[flow.shared[0][0]] = None
            return
        flow.rate, flow.since_s = flow.alone, now_s
        flow.stop_s = now_s + num_bytes / flow.alone
        self.at(flow.stop_s, flow)

    def stop(self, flow: Flow) -> None:
        """Takes a flow off its links; the others speed up at the next `settle`."""
        flow.rate = 0.0
        for link, _ in flow.shared:
            on_link = self._on_link[link]
            del on_link[flow]
            if on_link:
                self._touched[link] = None

    def end(self, flow: Flow) -> None:
        """Stops a flow that has carried everything, and tells so."""
        self.stop(flow)
        if flow.over is not None:
            flow.over(flow.load)

    def let_go(self) -> None:
        """Cuts the circles of references through those who are told."""
        for flow in self.flows:
            flow.load = flow.over = None

    def settle(self, now_s: float) -> None:
        """Gives every flow that is reached by a change its new rate."""
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        while touched:
            link, _ = touched.popitem()
            if self._on_link[link]:  # mostly all of its flows are over at one moment
                for flow, rate in self._rates_of(self._component(link, touched)).items():
                    if rate != flow.rate:
                        if flow.rate:
                            flow.left_bytes = max(flow.left_bytes - flow.rate * (now_s - flow.since_s), 0.0)
                        flow.rate, flow.since_s = rate, now_s
                        flow.stop_s = now_s + flow.left_bytes / rate
                        self.at(flow.stop_s, flow)

    def _component(self, first: int, touched: dict[int, None]) -> list[Flow]:
        """The flows that share links with a link, directly or through others; takes their links away."""
        on_links, links, seen = self._on_link, [first], {first}
        flows: dict[Flow, None] = {}
        while links:
            for flow in on_links[links.pop()]:
                if flow not in flows:
                    flows[flow] = None
                    for link, _ in flow.shared:
                        if link not in seen:
                            seen.add(link)
                            touched.pop(link, None)
                            if len(on_links[link]) > 1:
                                links.append(link)
        return list(flows)

    def _rates_of(self, flows: list[Flow]) -> dict[Flow, float]:
        """Fair rates, which depend on nothing but who is under way: the same groups meet in every batch."""
        if len(flows) == 1:
            return {flows[0]: flows[0].alone}
        key = tuple(sorted([flow.number for flow in flows]))
        found = self._known.get(key)
        if found is None:
            found = _fair_rates(flows, self.rates, self._on_link)
            if len(self._known) < 100_000:  # or they would fill the memory
                self._known[key] = found
        return found


def shared_loads(every: Sequence[Loads], rates: Sequence[float]) -> list[Loads]:
    """For each of the loads those that can decide how links are shared.

    A link with one user is in that user's own bound already. One whose users all load another link at least as much
    that is no faster is never full before that one:

        a ──┐                                          a's and b's own links of 12 B/s never matter,
        b ──┴─ switch ─ 12 B/s ─ nic ─ 10 B/s ─ net    nor does the switch's: only the last one does
    """
    users: dict[int, dict[int, int]] = {}
    for number, loads in enumerate(every):
        for link, edges in loads:
            users.setdefault(link, {})[number] = edges
    kept = {link for link, on_link in users.items() if len(on_link) > 1}
    for link in sorted(kept, key=lambda link: (-rates[link], len(users[link]))):
        own = users[link]
        beside = every[min(own, key=lambda number: len(every[number]))]
        if any(
            _is_covered(own, users[other])
            for other, _ in beside
            if other in kept and rates[other] <= rates[link] and other != link
        ):
            kept.discard(link)
    return [tuple(load for load in loads if load[0] in kept) for loads in every]


def _is_covered(users: dict[int, int], others: dict[int, int]) -> bool:
    """Whether all users of one link load another one at least as much."""
    return len(others) >= len(users) and all(others.get(number, 0) >= edges for number, edges in users.items())


def _fair_rates(flows: Iterable[Flow], rates: Sequence[float], on_link: Sequence[dict[Flow, int]]) -> dict[Flow, float]:
    """The max-min fair rate of each flow: all rise together until a link is full or a flow reaches its own bound.

    Links with one flow only are in that flow's own bound already.
    """
    waiting = sorted(flows, key=lambda flow: (-flow.alone, -flow.number))
    left: dict[int, float] = {}
    edges_on: dict[int, int] = {}
    for flow in waiting:
        for link, edges in flow.shared:
            if len(on_link[link]) > 1:
                left[link] = rates[link]
                edges_on[link] = edges_on.get(link, 0) + edges
    found: dict[Flow, float] = {}
    while waiting:
        shares = {link: left[link] / edges for link, edges in edges_on.items()}
        full = min(shares, key=lambda link: shares[link], default=-1)
        level = shares.get(full, inf)
        if waiting[-1].alone <= level:
            level = waiting[-1].alone
            fixed = [waiting.pop()]
        else:
            fixed = [flow for flow in on_link[full] if flow not in found]
        for flow in fixed:
            found[flow] = level
            for link, edges in flow.shared:
                if link in edges_on:
                    left[link] -= edges * level
                    edges_on[link] -= edges
                    if not edges_on[link]:
                        del edges_on[link]
        while waiting and waiting[-1] in found:
            waiting.pop()
    return found
