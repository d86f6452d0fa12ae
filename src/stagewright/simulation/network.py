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

Loads = tuple[tuple[int, int], ...]
"""(directed link, edges on it), link by link."""


class Flow:
    """Bytes on their way, with the rate they have now and when they would arrive with it."""

    __slots__ = ("alone", "left_bytes", "loads", "number", "rate", "since_s", "stop_s", "turn")

    def __init__(self, number: int, loads: Loads, num_bytes: float, alone: float) -> None:
        self.number, self.loads, self.left_bytes, self.alone = number, loads, num_bytes, alone
        self.rate = 0.0
        self.since_s = self.stop_s = 0.0
        self.turn = 0
        """How often the rate has changed: an arrival that was foreseen at an earlier turn is void."""


class Network:
    """The flows under way; `on_change(flow)` hears of every new rate."""

    def __init__(self, rates: Sequence[float], on_change: Callable[[Flow], None]) -> None:
        self.rates = rates
        self.on_change = on_change
        self._on_link: list[dict[Flow, int]] = [{} for _ in rates]
        self._touched: dict[int, None] = {}
        self._num_flows = 0

    def start(self, loads: Loads, num_bytes: float, now_s: float, alone: float) -> Flow:
        """A new flow, `alone` being its rate on empty links; if it shares some, it moves from the next `settle` on."""
        self._num_flows += 1
        flow = Flow(self._num_flows, loads, num_bytes, alone)
        shares, on_links = False, self._on_link
        for link, edges in loads:
            on_link = on_links[link]
            shares = shares or bool(on_link)
            on_link[flow] = edges
        if shares:
            self._touched[loads[0][0]] = None
        else:
            self._change(flow, alone, now_s)
        return flow

    def stop(self, flow: Flow) -> None:
        """Takes a flow off its links; the others speed up at the next `settle`."""
        for link, _ in flow.loads:
            on_link = self._on_link[link]
            del on_link[flow]
            if on_link:
                self._touched[link] = None

    def settle(self, now_s: float) -> None:
        """Gives every flow that is reached by a change its new rate."""
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        while touched:
            flows = self._component(touched)
            if len(flows) == 1:
                (flow,) = flows
                self._change(flow, flow.alone, now_s)
                continue
            for flow, rate in fair_rates(flows, self.rates, self._on_link).items():
                self._change(flow, rate, now_s)

    def _component(self, touched: dict[int, None]) -> dict[Flow, None]:
        """The flows that share links with one touched link, directly or through others; takes its links away."""
        first, _ = touched.popitem()
        links, seen = [first], {first}
        flows: dict[Flow, None] = {}
        while links:
            for flow in self._on_link[links.pop()]:
                if flow in flows:
                    continue
                flows[flow] = None
                for link, _ in flow.loads:
                    if link not in seen:
                        seen.add(link)
                        touched.pop(link, None)
                        if len(self._on_link[link]) > 1:
                            links.append(link)
        return flows

    def _change(self, flow: Flow, rate: float, now_s: float) -> None:
        if rate == flow.rate:
            return
        if flow.rate:
            flow.left_bytes = max(flow.left_bytes - flow.rate * (now_s - flow.since_s), 0.0)
        flow.rate, flow.since_s = rate, now_s
        flow.stop_s = now_s + flow.left_bytes / rate
        flow.turn += 1
        self.on_change(flow)

    def used(self) -> list[float]:
        """Bytes a second on each directed link now."""
        return [sum(flow.rate * edges for flow, edges in on_link.items()) for on_link in self._on_link]


def fair_rates(flows: Iterable[Flow], rates: Sequence[float], on_link: Sequence[dict[Flow, int]]) -> dict[Flow, float]:
    """The max-min fair rate of each flow: all rise together until a link is full or a flow reaches its own bound.

    Links with one flow only are in that flow's own bound already.
    """
    waiting = sorted(flows, key=lambda flow: (-flow.alone, -flow.number))
    left, edges_on = _shared_links(waiting, rates, on_link)
    found: dict[Flow, float] = {}
    while waiting:
        full, level = _fullest(left, edges_on)
        if waiting[-1].alone <= level:
            level = waiting[-1].alone
            fixed = [waiting.pop()]
        else:
            fixed = [flow for flow in on_link[full] if flow not in found]
        for flow in fixed:
            found[flow] = level
            _take(flow, level, left, edges_on)
        while waiting and waiting[-1] in found:
            waiting.pop()
    return found


def _shared_links(
    flows: Iterable[Flow], rates: Sequence[float], on_link: Sequence[dict[Flow, int]]
) -> tuple[dict[int, float], dict[int, int]]:
    left: dict[int, float] = {}
    edges_on: dict[int, int] = {}
    for flow in flows:
        for link, edges in flow.loads:
            if len(on_link[link]) > 1:
                left[link] = rates[link]
                edges_on[link] = edges_on.get(link, 0) + edges
    return left, edges_on


def _fullest(left: dict[int, float], edges_on: dict[int, int]) -> tuple[int, float]:
    """The link that is full first, and the rate of its edges then."""
    full, level = -1, inf
    for link, edges in edges_on.items():
        share = left[link] / edges
        if share < level:
            full, level = link, share
    return full, level


def _take(flow: Flow, rate: float, left: dict[int, float], edges_on: dict[int, int]) -> None:
    for link, edges in flow.loads:
        if link in edges_on:
            left[link] -= edges * rate
            edges_on[link] -= edges
            if not edges_on[link]:
                del edges_on[link]
