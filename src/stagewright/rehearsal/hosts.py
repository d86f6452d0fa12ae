"""Emulated hosts: a network namespace each, joined by a bridge that has a namespace of its own.

    namespace …-0        namespace …-switch          namespace …-1
    [wire] ───────────── [port0] bridge [port1] ─────────── [wire]
       └ rate, latency      └ rate, latency: of what goes to host 0

Nothing is made outside of these namespaces, so no other interface is touched and nobody else sees the addresses.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from stagewright.cluster import Cluster
from stagewright.plan import Plan
from stagewright.rehearsal.cores import has_groups, kept_awake, make_group
from stagewright.rehearsal.leftovers import new_mark, prefix, remove
from stagewright.rehearsal.tools import batch, call, check_tools, works
from stagewright.rehearsal.wiring import Wiring, wirings

_RANGE = "10.213.77"
"""The first three parts of the hosts' addresses; they only exist inside the namespaces."""
_WIRE = "wire"
"""The interface of every emulated host."""


@dataclass(frozen=True)
class EmulatedHosts:
    """Hosts that run, and how a process gets into one of them."""

    key: str
    wirings: tuple[Wiring, ...]
    groups: tuple[str, ...]
    """For each host the folder of its control group; nothing where it has no share and the machine no such groups."""
    has_latency: bool
    """Whether the latencies are emulated: the kernel may lack netem."""
    cpus: tuple[int, ...] = ()
    """The cores that all hosts share; none given, all that this process may use."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """For each host its address."""
        return tuple(_address(number) for number in range(len(self.wirings)))

    def used(self, plan: Plan) -> list[int]:
        """For each worker its host; a plan for slices of one card has a host for each of its workers too."""
        if {id.host for id in plan.devices} == {0}:
            return list(range(len(plan.devices)))
        return [id.host for id in plan.devices]

    def enter(self, host: int) -> None:
        """Moves this process into a host."""
        if self.groups[host]:
            Path(self.groups[host], "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        network = os.open(Path("/run/netns") / namespace(self.key, host), os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(network, 0x40000000):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace of host {host}")
        finally:
            os.close(network)

    def environment(self) -> dict[str, str]:
        """What workers in these hosts need to know: which interface is theirs."""
        return {"GLOO_SOCKET_IFNAME": _WIRE, "TP_SOCKET_IFNAME": _WIRE, "NCCL_SOCKET_IFNAME": _WIRE}


def namespace(key: str, host: int | str) -> str:
    """The name of a host's namespace."""
    return f"{prefix(key)}{host}"


def _address(host: int) -> str:
    """A host's address."""
    return f"{_RANGE}.{host + 1}"


@contextmanager
def emulated_hosts(cluster: Cluster) -> Iterator[EmulatedHosts]:
    """The cluster's hosts, emulated here; all is removed at the end, and what killed rehearsals left before."""
    check_tools()
    wanted = wirings(cluster)
    mark = new_mark()
    try:
        with _answering(signal.SIGTERM, _leave), kept_awake(namespace(mark.key, "awake"), os.sched_getaffinity(0)):
            yield replace(_make_hosts(mark.key, wanted), cpus=_shared_cpus(cluster))
    finally:
        # A second Ctrl-C must not stop the removal.
        with _answering(signal.SIGINT, signal.SIG_IGN):
            remove(mark.key)
            mark.release()


@contextmanager
def _answering(
    number: signal.Signals, how: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Answers a signal in another way meanwhile; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, how)
    try:
        yield
    finally:
        signal.signal(number, before)


def _shared_cpus(cluster: Cluster) -> tuple[int, ...]:
    """The first of this process's cores, as many as the cluster's hosts share; none where that is all of them."""
    own = sorted(os.sched_getaffinity(0))
    wanted = len(own) if cluster.cores is None else math.ceil(cluster.cores)
    return tuple(own[:wanted]) if wanted < len(own) else ()


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends this process in order, so that what it made is removed."""
    sys.exit(128 + number)


def _make_hosts(key: str, wanted: tuple[Wiring, ...]) -> EmulatedHosts:
    """The namespaces, the bridge, the wires with their limits, and the control groups."""
    switch = namespace(key, "switch")
    call("ip", "netns", "add", switch)
    batch("ip", ["link add bridge type bridge", "link set bridge up"], switch)
    has_latency = _knows_netem(switch)
    for number, wiring in enumerate(wanted):
        own = namespace(key, number)
        call("ip", "netns", "add", own)
        call("ip", "link", "add", _WIRE, "netns", own, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
        batch("ip", [f"link set port{number} master bridge", f"link set port{number} up"], switch)
        batch("ip", [f"address add {_address(number)}/24 dev {_WIRE}", f"link set {_WIRE} up", "link set lo up"], own)
        batch("tc", _limit(_WIRE, wiring, has_latency), own)
        batch("tc", _limit(f"port{number}", wiring, has_latency), switch)
    groups = _make_groups(key, [wiring.cores for wiring in wanted])
    return EmulatedHosts(key, wanted, groups, has_latency or not any(wiring.latency_s for wiring in wanted))


def _make_groups(key: str, shares: Sequence[float | None]) -> tuple[str, ...]:
    """For each host a control group with its share, or the one that all hosts without a share are in together."""
    common = os.fspath(make_group(namespace(key, "free"), None)) if None in shares and has_groups() else ""
    return tuple(
        common if cores is None else os.fspath(make_group(namespace(key, number), cores))
        for number, cores in enumerate(shares)
    )


def _limit(interface: str, wiring: Wiring, has_latency: bool) -> list[str]:
    """tc's lines for what leaves through an interface: a bucket of tokens, and a delay behind it.

    1 ms may pass at once, and always two of the kernel's large packets and more. With less the bucket cuts them up into
    those of Ethernet, and a byte takes ten times the cores: at 300 Mbit/s hosts lost half of their compute to what they
    sent. So much may wait that nothing is lost, as on links with flow control.
    """
    burst = round(min(max(wiring.bytes_per_s * 1e-3, 128 << 10), 512 << 10))
    rate = f"rate {round(wiring.bytes_per_s * 8)}bit burst {burst} limit {64 << 20}"
    lines = [f"qdisc add dev {interface} root handle 1: tbf {rate}"]
    if has_latency and wiring.latency_s:
        delay = f"netem delay {wiring.latency_s * 1e6:.0f}us limit 100000"
        lines.append(f"qdisc add dev {interface} parent 1:1 handle 2: {delay}")
    return lines


def _knows_netem(switch: str) -> bool:
    """Whether the kernel can delay packets; tried on the bridge, which is new and empty."""
    known = works("tc", "-n", switch, "qdisc", "add", "dev", "bridge", "root", "netem", "delay", "1us")
    if known:
        call("tc", "-n", switch, "qdisc", "delete", "dev", "bridge", "root")
    return known
