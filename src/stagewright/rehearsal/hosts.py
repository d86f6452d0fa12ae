"""Emulated hosts: a network namespace each, joined by a bridge that has a namespace of its own.

    namespace …-0        namespace …-switch          namespace …-1
    [wire] ───────────── [port0] bridge [port1] ─────────── [wire]
       └ rate, latency      └ rate, latency: of what goes to host 0

Nothing is made outside of these namespaces, so no other interface is touched and nobody else sees the addresses.

All hosts hang on one switch, so a cluster can be rehearsed where the rate between any two hosts is that of the slower
one's own link:

    host 0 ── 37.5 MB/s ──┐
    host 1 ── 37.5 MB/s ──┼── switch        0 → 2 goes at 12.5 MB/s, and so does 1 → 2; both at once share it
    host 2 ── 12.5 MB/s ──┘

Each rehearsal has a key, which all its names carry, and holds the lock of a file of that name while it lives. The lock
goes with the process, however that ends; so a file whose lock is free marks what may be removed.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from types import FrameType

from stagewright.cluster import Cluster, DeviceId
from stagewright.errors import ClusterError, RunError
from stagewright.plan import Plan
from stagewright.profiling.detect import num_cores
from stagewright.rehearsal.tools import batch, call, check_tools, end, groups, kept_awake, make_group, remove_group

_RANGE = "10.213.77"
"""The first three parts of the hosts' addresses; they only exist inside the namespaces."""
_WIRE = "wire"
"""The interface of every emulated host."""
_LOCKS = Path("/run/lock/stagewright")
_GATE = "gate"
_PREFIX = "stagewright-"


@dataclass(frozen=True)
class EmulatedHosts:
    """Hosts that run, and how a process gets into one of them."""

    key: str
    addresses: tuple[str, ...]
    groups: tuple[Path | None, ...]
    """For each host its control group; None where it has no share and the machine no such groups."""
    has_latency: bool
    """Whether the latencies are emulated: the kernel may lack netem."""
    cpus: tuple[int, ...] = ()
    """The cores that all hosts share; none given, all that this process may use."""

    def used(self, plan: Plan) -> list[int]:
        """For each worker its host; a plan for slices of one card has a host for each of its workers too."""
        if {id.host for id in plan.devices} == {0}:
            return list(range(len(plan.devices)))
        return [id.host for id in plan.devices]

    def enter(self, host: int) -> None:
        """Moves this process into a host."""
        group = self.groups[host]
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
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


@contextmanager
def emulated_hosts(cluster: Cluster) -> Iterator[EmulatedHosts]:
    """The cluster's hosts, emulated here; all is removed at the end, and what killed rehearsals left before."""
    check_tools()
    wanted = wirings(cluster)
    with (
        _own_key() as key,
        _answering(signal.SIGTERM, _leave),
        kept_awake(namespace(key, "awake"), os.sched_getaffinity(0)),
    ):
        yield replace(_make_hosts(key, wanted), cpus=_shared_cpus(cluster))


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


def _make_hosts(key: str, wanted: tuple[_Wiring, ...]) -> EmulatedHosts:
    """The namespaces, the bridge, the wires with their limits, and the control groups."""
    switch = namespace(key, "switch")
    call("ip", "netns", "add", switch)
    batch("ip", ["link add bridge type bridge", "link set bridge up"], switch)
    has_latency, addresses = _knows_netem(switch), tuple(f"{_RANGE}.{number + 1}" for number in range(len(wanted)))
    for number, wiring in enumerate(wanted):
        own = namespace(key, number)
        call("ip", "netns", "add", own)
        call("ip", "link", "add", _WIRE, "netns", own, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
        batch("ip", [f"link set port{number} master bridge", f"link set port{number} up"], switch)
        batch("ip", [f"address add {addresses[number]}/24 dev {_WIRE}", f"link set {_WIRE} up", "link set lo up"], own)
        batch("tc", _limit(_WIRE, wiring, has_latency), own)
        batch("tc", _limit(f"port{number}", wiring, has_latency), switch)
    shares = [wiring.cores for wiring in wanted]
    common = make_group(namespace(key, "free"), None) if None in shares else None
    folders = tuple(
        common if cores is None else make_group(namespace(key, number), cores) for number, cores in enumerate(shares)
    )
    return EmulatedHosts(key, addresses, folders, has_latency or not any(wiring.latency_s for wiring in wanted))


def _limit(interface: str, wiring: _Wiring, has_latency: bool) -> list[str]:
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
    try:
        call("tc", "-n", switch, "qdisc", "add", "dev", "bridge", "root", "netem", "delay", "1us")
    except RunError:
        return False
    call("tc", "-n", switch, "qdisc", "delete", "dev", "bridge", "root")
    return True


# ── what each host gets, read from a cluster ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Wiring:
    """One emulated host: its link to the switch, the same in both directions, and the cores it may use."""

    bytes_per_s: float
    latency_s: float
    cores: float | None
    """None where the host takes what the others leave."""


def wirings(cluster: Cluster) -> tuple[_Wiring, ...]:
    """For each host of the cluster what a rehearsal gives it."""
    _check_hosts(cluster)
    numbers = range(len(cluster.hosts))
    links = {
        pair: [wire for wire, _ in cluster.path(DeviceId(pair[0], 0), DeviceId(pair[1], 0))]
        for pair in combinations(numbers, 2)
    }
    _check_trunks(cluster, links)
    speeds = {pair: min(cluster.wires[wire].bytes_per_s for wire in each) for pair, each in links.items()}
    delays = {pair: sum(cluster.wires[wire].latency_s for wire in each) for pair, each in links.items()}
    rates = [max(rate for pair, rate in speeds.items() if number in pair) for number in numbers]
    for (first, second), rate in speeds.items():
        least = min(rates[first], rates[second])
        if abs(rate - least) > 1e-6 * rate:
            raise ClusterError(
                f"hosts {first} and {second} of {cluster.name} are joined at {rate:.4g} bytes/s, though each has a "
                f"link of {least:.4g} or more: emulated hosts have one switch",
                "give each host one link to a common junction",
            )
    return tuple(_Wiring(rates[n], _own_latency_s(n, delays), cluster.hosts[n].cpu_share) for n in numbers)


def _check_hosts(cluster: Cluster) -> None:
    """Refuses what is no set of hosts with one worker each, and shares of the CPU that this machine does not have."""
    if not 2 <= len(cluster.hosts) <= 250:  # as many as the private range has addresses
        raise ClusterError(
            f"{cluster.name} has {len(cluster.hosts)} hosts: a rehearsal emulates 2 to 250",
            "give a cluster file with several hosts, or --slices N to cut one card",
        )
    for number, host in enumerate(cluster.hosts):
        if len(host.devices) > 1:
            raise ClusterError(
                f"host {number} of {cluster.name} has {len(host.devices)} devices: a rehearsal runs one worker a host",
                "write each device as a host of its own",
            )
    wanted, cores = max(sum(host.cpu_share or 0.0 for host in cluster.hosts), cluster.cores or 0.0), num_cores()
    if wanted > cores * (1 + 1e-6):
        raise ClusterError(
            f"the hosts of {cluster.name} want {wanted:g} CPU cores together, and this machine has {cores}",
            "lower the hosts' cpu_share and the cluster's cores",
        )


def _check_trunks(cluster: Cluster, links: Mapping[tuple[int, int], Sequence[int]]) -> None:
    """Refuses a wire that two pairs of hosts share without a host in common: one switch has no such wire."""
    common: dict[int, set[int]] = {}
    for pair, wires in links.items():
        for wire in wires:
            common[wire] = common.get(wire, set(pair)) & set(pair)
    trunk = next((wire for wire, hosts in common.items() if not hosts), None)
    if trunk is not None:
        raise ClusterError(
            f"several pairs of hosts share the link {' – '.join(cluster.wires[trunk].ends)} of {cluster.name}: "
            "emulated hosts have one switch",
            "give each host one link to a common junction",
        )


def _own_latency_s(host: int, delays: Mapping[tuple[int, int], float]) -> float:
    """A host's part of its latencies: a(b) + b(c) − a(c) is twice its own, for any two others; half of it for one."""

    def between(one: int, other: int) -> float:
        return delays[min(one, other), max(one, other)]

    others = sorted({number for pair in delays for number in pair} - {host})
    if len(others) == 1:
        return between(host, others[0]) / 2
    found = [(between(host, a) + between(host, b) - between(a, b)) / 2 for a, b in combinations(others, 2)]
    return max(0.0, median(found))


# ── keys, and what is left of rehearsals that were killed ──────────────────────────────────────────────────────────


def namespace(key: str, host: int | str = "") -> str:
    """The name of a host's namespace or control group; without a host, how all of a key's begin."""
    return f"{_PREFIX}{key}-{host}"


@contextmanager
def _own_key() -> Iterator[str]:
    """A key of its own, after what killed rehearsals left was removed; at the end all that carries it is."""
    _LOCKS.mkdir(parents=True, exist_ok=True)
    # One process at a time: otherwise one could take another's new file for a stale one before its lock is held.
    gate = os.open(_LOCKS / _GATE, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        clean_up()
        key = secrets.token_hex(3)
        lock = os.open(_LOCKS / key, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(gate)
    try:
        yield key
    finally:
        # A second Ctrl-C must not stop the removal.
        with _answering(signal.SIGINT, signal.SIG_IGN):
            _remove(key)
            os.close(lock)


def namespaces(start: str = _PREFIX) -> list[str]:
    """The namespaces whose names begin like this."""
    names = (line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip())
    return sorted(name for name in names if name.startswith(start))


def keys() -> set[str]:
    """The keys of all rehearsals that have left or still hold anything."""
    names = [*namespaces(), *(folder.name for folder in groups(_PREFIX))]
    found = {match[1] for name in names if (match := re.fullmatch(rf"{_PREFIX}([0-9a-f]{{6}})-.*", name))}
    return found | {path.name for path in (_LOCKS.iterdir() if _LOCKS.is_dir() else ()) if path.name != _GATE}


def clean_up() -> list[str]:
    """Removes what killed rehearsals left, and returns their keys."""
    gone = [key for key in sorted(keys()) if is_stale(key)]
    for key in gone:
        _remove(key)
    return gone


def is_stale(key: str) -> bool:
    """Whether nobody holds the key's lock any more."""
    try:
        file = os.open(_LOCKS / key, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(file)


def _remove(key: str) -> None:
    """Ends the processes of a rehearsal's hosts, and removes namespaces, links, control groups and the mark."""
    for name in namespaces(namespace(key)):
        until = time.monotonic() + 30.0
        while (running := call("ip", "netns", "pids", name).split()) and time.monotonic() < until:
            end(running)
            time.sleep(0.02)
        call("ip", "netns", "delete", name)
    for folder in groups(namespace(key)):
        remove_group(folder)
    (_LOCKS / key).unlink(missing_ok=True)
