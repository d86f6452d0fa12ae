"""What each emulated host gets, read from a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.cluster import Cluster, Link, find_cluster
from stagewright.errors import ClusterError
from stagewright.rehearsal.hosts import wirings
from tests.rehearsal.clusters import star


def test_each_host_has_the_rate_of_its_own_link() -> None:
    found = wirings(star(3e7, 3e7, 1e7))
    assert [each.bytes_per_s for each in found] == [3e7, 3e7, 1e7]


def test_latencies_are_those_of_the_own_links() -> None:
    cluster = star(1e7, 1e7, 1e7)
    slow = replace(cluster.links[2], latency_s=5e-3)
    links = (*(replace(link, latency_s=1e-3) for link in cluster.links[:2]), slow)
    found = wirings(replace(cluster, links=links))
    assert [each.latency_s for each in found] == pytest.approx([1e-3, 1e-3, 5e-3])


def test_two_hosts_with_one_cable_have_half_of_its_latency_each() -> None:
    cluster = star(1e7, 1e7)
    cable = Link(ends=("0:nic", "1:nic"), kind="NET", bytes_per_s=2e6, latency_s=4e-3)
    found = wirings(replace(cluster, links=(cable,)))
    assert [(each.bytes_per_s, each.latency_s) for each in found] == [(2e6, 2e-3), (2e6, 2e-3)]


def test_shares_of_the_cpu_are_passed_on() -> None:
    found = wirings(star(1e7, 1e7, shares=(0.25, None)))
    assert [each.cores for each in found] == [0.25, None]


def test_ready_made_hosts_can_be_emulated() -> None:
    assert len(wirings(find_cluster("hosts-4"))) == 4
    assert [each.cores for each in wirings(find_cluster("hosts-8"))] == [0.25] * 8


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (star(1e7), "has 1 host"),
        (find_cluster("titan-v-8"), "has 1 host"),
        (star(1e7, 1e7, shares=(900.0, 900.0)), "want 1800 CPU cores together"),
    ],
)
def test_what_cannot_be_emulated_is_refused(cluster: Cluster, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        wirings(cluster)


def test_a_host_with_two_devices_is_refused() -> None:
    cluster = star(1e7, 1e7)
    double = replace(cluster.hosts[0], devices=cluster.hosts[0].devices * 2)
    links = (*double.links, Link(ends=("1", "nic"), kind="local", bytes_per_s=1e12))
    with pytest.raises(ClusterError, match="host 0 of star has 2 devices: a rehearsal runs one worker a host"):
        wirings(replace(cluster, hosts=(replace(double, links=links), cluster.hosts[1])))


def test_a_trunk_between_two_switches_is_refused() -> None:
    cluster = star(1e7, 1e7, 1e7, 1e7)
    ends = [("0:nic", "left"), ("1:nic", "left"), ("2:nic", "right"), ("3:nic", "right"), ("left", "right")]
    links = tuple(Link(ends=pair, kind="NET", bytes_per_s=1e7) for pair in ends)
    with pytest.raises(ClusterError, match="share the link left – right"):
        wirings(replace(cluster, links=links))


def test_rates_that_no_single_switch_has_are_refused() -> None:
    cluster = star(1e7, 1e7, 1e7)
    ends = [("0:nic", "1:nic"), ("1:nic", "2:nic"), ("0:nic", "2:nic")]
    links = tuple(Link(ends=pair, kind="NET", bytes_per_s=rate) for pair, rate in zip(ends, (1e7, 2e7, 3e7)))
    with pytest.raises(ClusterError, match="hosts 0 and 1 of star are joined at 1e\\+07 bytes/s"):
        wirings(replace(cluster, links=links))
