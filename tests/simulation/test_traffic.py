"""Fair rates on shared links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewright.simulation.traffic import Flow, Traffic, shared_loads
from tests.simulation.cases import used


class Links:
    """Traffic with a clock of its own, so that flows can be started at will."""

    def __init__(self, *rates: float) -> None:
        self.traffic = Traffic(rates, lambda time_s, flow: None)
        self.rates = rates

    def start(self, *links: int, num_bytes: float = 100.0, edges: int = 1) -> Flow:
        loads = tuple((link, edges) for link in links)
        alone = min(self.rates[link] / edges for link in links)
        flow = self.traffic.make_flow(loads, alone)
        self.traffic.start(flow, num_bytes, 0.0)
        return flow

    def settled(self, *flows: Flow) -> list[float]:
        self.traffic.settle(0.0)
        return [flow.rate for flow in flows]


def test_a_flow_alone_gets_its_slowest_link():
    links = Links(10.0, 4.0)
    assert links.settled(links.start(0, 1)) == [4.0]


def test_a_flow_that_is_held_back_elsewhere_leaves_the_rest_to_others():
    # Link 0 carries 10 for three; one of them gets only 2 on link 1, so the others get 4 each.
    links = Links(10.0, 2.0)
    flows = links.start(0, 1), links.start(0), links.start(0)
    assert links.settled(*flows) == pytest.approx([2.0, 4.0, 4.0])


def test_a_ring_that_crosses_a_link_twice_takes_two_shares():
    links = Links(9.0)
    ring, transfer = links.start(0, edges=2), links.start(0)
    assert links.settled(ring, transfer) == pytest.approx([3.0, 3.0])
    assert used(links.traffic) == pytest.approx([9.0])


def test_when_a_flow_ends_the_others_speed_up():
    links = Links(10.0)
    first, second = links.start(0), links.start(0, num_bytes=200.0)
    assert links.settled(first, second) == [5.0, 5.0]
    links.traffic.stop(first)
    links.traffic.settle(20.0)
    assert second.rate == 10.0
    assert second.stop_s == pytest.approx(30.0)


def test_flows_that_share_nothing_do_not_disturb_one_another():
    heard: list[int] = []
    traffic = Traffic((10.0, 10.0), lambda time_s, flow: heard.append(flow.number))
    first, second, third = (traffic.make_flow(((link, 1),), 10.0) for link in (0, 1, 1))
    traffic.start(first, 1.0, 0.0)
    traffic.start(second, 1.0, 0.0)
    traffic.settle(0.0)
    traffic.start(third, 1.0, 0.5)
    traffic.settle(0.5)
    assert heard == [1, 2, 2, 3] or heard == [1, 2, 3, 2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 3.0, 10.0]), min_size=4, max_size=4),
    st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(1, 3)), min_size=1, max_size=8),
)
def test_rates_are_max_min_fair(rates, wanted):
    # Every flow has a bottleneck: a full link on which no other flow is faster.
    links = Links(*rates)
    flows = [links.start(*sorted(some), edges=edges) for some, edges in wanted]
    links.settled()
    have = used(links.traffic)
    assert all(here <= rate * (1 + 1e-9) for here, rate in zip(have, rates))
    for flow in flows:
        full = [link for link, _ in flow.loads if have[link] >= rates[link] * (1 - 1e-9)]
        fastest = [max(other.rate for other in flows if link in dict(other.loads)) for link in full]
        assert any(flow.rate >= rate * (1 - 1e-9) for rate in fastest)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 3.0, 3.0, 10.0]), min_size=6, max_size=6),
    st.lists(st.dictionaries(st.integers(0, 5), st.integers(1, 2), min_size=1), min_size=1, max_size=6),
    st.data(),
)
def test_links_that_never_matter_can_be_left_out(rates, wanted, data):
    every = [tuple(sorted(loads.items())) for loads in wanted]
    running = data.draw(st.sets(st.sampled_from(range(len(every))), min_size=1))
    found = []
    for is_whole in (True, False):
        traffic = Traffic(rates, lambda time_s, flow: None)
        flows = [traffic.make_flow(loads, min(rates[link] / edges for link, edges in loads)) for loads in every]
        if not is_whole:
            traffic.leave_out()
        for number in sorted(running):
            traffic.start(flows[number], 1.0, 0.0)
        traffic.settle(0.0)
        found.append([flow.rate for flow in flows])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_only_the_narrowest_of_links_in_a_row_is_kept():
    # 0 and 1 leave through links 0 and 1, then both over 2 and 3; link 3 is the narrowest.
    assert shared_loads([((0, 1), (2, 1), (3, 1)), ((1, 1), (2, 1), (3, 1))], (12, 12, 12, 10)) == [((3, 1),)] * 2
