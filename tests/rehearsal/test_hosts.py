"""Emulated hosts: they reach one another, are limited, and leave nothing behind, however they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stagewright.errors import UsageError
from stagewright.rehearsal import EmulatedHosts, emulated_hosts
from stagewright.rehearsal.hosts import clean_up, keys, namespace, namespaces
from stagewright.rehearsal.tools import call, check_tools, groups, limits, missing
from tests.rehearsal.clusters import star

needs_root = pytest.mark.skipif(missing() is not None, reason=f"emulated hosts: {missing()}")
WAIT_S = 30.0

SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
peer, where = server.accept()
peer.sendall(where[0].encode())
"""
ASK = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=20)
print(peer.recv(100).decode())
"""
SINK = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
peer, _ = server.accept()
left = 25_000_000
while left:
    left -= len(peer.recv(min(left, 1 << 20)))
peer.sendall(b"k")
"""
SOURCE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
started = time.perf_counter()
peer.sendall(bytes(25_000_000))
peer.recv(1)
print(25e6 / (time.perf_counter() - started))
"""
HOLD = """
import subprocess, sys, time
from functools import partial
from stagewright.rehearsal import emulated_hosts
from tests.rehearsal.clusters import star
with emulated_hosts(star(1e7, 1e7, shares=(0.25, None))) as hosts:
    inside = [subprocess.Popen(["sleep", "600"], preexec_fn=partial(hosts.enter, host)) for host in (0, 1)]
    print(hosts.key, flush=True)
    time.sleep(600)
"""


@needs_root
def test_hosts_reach_one_another_by_their_own_addresses() -> None:
    with emulated_hosts(star(1e7, 1e7)) as hosts:
        server = start_in(hosts, 1, sys.executable, "-c", SERVE)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        seen = start_in(hosts, 0, sys.executable, "-c", ASK, hosts.addresses[1]).communicate(timeout=WAIT_S)[0]
        server.wait(WAIT_S)
        server.stdout.close()
    assert seen.strip() == hosts.addresses[0]


@needs_root
def test_both_directions_of_every_link_are_limited() -> None:
    with emulated_hosts(star(37.5e6, 37.5e6, 12.5e6)) as hosts:
        out = [call("tc", "-n", namespace(hosts.key, host), "qdisc", "show", "dev", "wire") for host in range(3)]
        back = [call("tc", "-n", namespace(hosts.key, "switch"), "qdisc", "show", "dev", f"port{n}") for n in range(3)]
    for host, rate in enumerate(("300Mbit", "300Mbit", "100Mbit")):
        assert f"rate {rate} burst 128Kb" in out[host], "less would cut the kernel's large packets up"
        assert f"rate {rate} burst 128Kb" in back[host]


@needs_root
def test_a_share_of_the_cpu_holds_for_what_runs_in_the_host() -> None:
    with emulated_hosts(star(1e7, 1e7, shares=(0.25, None))) as hosts:
        here = hosts.groups[0]
        assert here is not None
        inside = start_in(hosts, 0, "sleep", "600")
        wait_until(lambda: str(inside.pid) in (here / "cgroup.procs").read_text().split())
        files = ("cpu.max",) if (here / "cpu.max").exists() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        figures = " ".join((here / name).read_text().strip() for name in files)
    inside.communicate(timeout=WAIT_S)
    assert figures == "5000 20000"


@needs_root
def test_hosts_without_a_share_are_in_one_group_without_a_quota() -> None:
    """In groups of their own, as the kernel makes them for sessions, they would share cores unevenly."""
    with emulated_hosts(star(1e7, 1e7, 1e7, shares=(0.25, None, None))) as hosts:
        common = hosts.groups[1]
        assert common is not None
        assert hosts.groups[2] == hosts.groups[1] != hosts.groups[0]
        inside = [start_in(hosts, host, "sleep", "600") for host in (1, 2)]
        wait_until(lambda: {str(one.pid) for one in inside} <= set((common / "cgroup.procs").read_text().split()))
        name = "cpu.max" if (common / "cpu.max").exists() else "cpu.cfs_quota_us"
        quota = (common / name).read_text().split()[0]
    for one in inside:
        one.communicate(timeout=WAIT_S)
    assert quota in ("max", "-1")
    assert not common.exists()


@needs_root
def test_cores_are_kept_awake_by_processes_that_take_nothing_from_hosts() -> None:
    with emulated_hosts(star(1e7, 1e7)) as hosts:
        (group,) = groups(namespace(hosts.key, "awake"))
        if not (group / "cpu.idle").is_file():
            pytest.skip("the kernel knows no idle groups")
        spinning = [int(word) for word in (group / "cgroup.procs").read_text().split()]
        assert (group / "cpu.idle").read_text().strip() == "1"
        assert [os.sched_getaffinity(one) for one in sorted(spinning)] == [{cpu} for cpu in os.sched_getaffinity(0)]
    assert not any(os.path.exists(f"/proc/{one}") for one in spinning)
    assert left_of(hosts.key) == []


def test_periods_are_short_and_quotas_never_below_the_smallest() -> None:
    assert limits(0.25) == (5_000, 20_000)
    assert limits(1.5) == (30_000, 20_000)
    quota, period = limits(0.01)
    assert (quota, period) == (1_000, 100_000)


@needs_root
def test_nothing_outside_of_the_namespaces_changes() -> None:
    before = interfaces()
    with emulated_hosts(star(1e7, 1e7)) as hosts:
        during = interfaces()
        assert len(namespaces(namespace(hosts.key))) == 3
    assert before == during == interfaces()
    assert namespaces(namespace(hosts.key)) == []
    assert hosts.key not in keys()


@needs_root
def test_a_failure_inside_removes_everything_too() -> None:
    with pytest.raises(ZeroDivisionError), emulated_hosts(star(1e7, 1e7, shares=(0.25, 0.25))) as hosts:
        raise ZeroDivisionError
    assert left_of(hosts.key) == []


@needs_root
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_removes_everything_itself(how: signal.Signals) -> None:
    holder, key = start_holder()
    assert len(namespaces(namespace(key))) == 3
    holder.send_signal(how)
    holder.wait(WAIT_S)
    assert left_of(key) == []


@needs_root
def test_after_kill_9_the_next_call_cleans_up_and_spares_the_living() -> None:
    (dead, dead_key), (alive, alive_key) = start_holder(), start_holder()
    try:
        dead.kill()
        dead.wait(WAIT_S)
        assert len(namespaces(namespace(dead_key))) == 3, "nobody has cleaned up yet"
        processes = call("ip", "netns", "pids", namespace(dead_key, 1)).split()
        assert processes, "what ran in the host still runs"
        assert dead_key in clean_up()
        assert left_of(dead_key) == []
        wait_until(lambda: not any(os.path.exists(f"/proc/{process}") for process in processes))
        assert len(namespaces(namespace(alive_key))) == 3
        assert call("ip", "netns", "pids", namespace(alive_key, 1)).split()
    finally:
        alive.terminate()
        alive.wait(WAIT_S)
    assert left_of(alive_key) == []


@pytest.mark.parametrize(
    ("tools", "user", "words"), [((), 0, "the command ip is not here"), (("ip", "tc"), 1000, "this is user 1000")]
)
def test_without_root_or_iproute2_it_says_so_in_one_line(
    tools: tuple[str, ...], user: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in tools:
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(UsageError, match=words) as caught:
        check_tools()
    assert "\n" not in caught.value.what


@needs_root
@pytest.mark.slow
def test_a_rate_is_what_sockets_see() -> None:
    """Never more, and no less either: the best of a few tries, for who waits for the processor sends nothing."""
    rates: list[float] = []
    with emulated_hosts(star(12.5e6, 12.5e6)) as hosts:
        while len(rates) < 8 and max(rates, default=0.0) < 0.85 * 12.5e6:
            server = start_in(hosts, 1, sys.executable, "-c", SINK)
            assert server.stdout is not None
            server.stdout.readline()
            source = start_in(hosts, 0, sys.executable, "-c", SOURCE, hosts.addresses[1])
            rates.append(float(source.communicate(timeout=60)[0]))
            server.wait(WAIT_S)
            server.stdout.close()
    assert 0.85 * 12.5e6 < max(rates) < 1.02 * 12.5e6


def start_in(hosts: EmulatedHosts, host: int, *command: str) -> subprocess.Popen[str]:
    """Starts a command in a host."""
    enter = partial(hosts.enter, host)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)


def start_holder() -> tuple[subprocess.Popen[str], str]:
    """A process that holds hosts, and their key."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout is not None
    key = holder.stdout.readline().strip()
    holder.stdout.close()
    assert key, "the holder did not start"
    return holder, key


def left_of(key: str) -> list[str]:
    """What is left of a rehearsal."""
    return [*namespaces(namespace(key)), *map(str, groups(namespace(key))), *(keys() & {key})]


def interfaces() -> list[str]:
    """The interfaces of this namespace."""
    return [name for _, name in socket.if_nameindex()]


def wait_until(true: Callable[[], bool]) -> None:
    """Returns when it is true; fails when it takes too long."""
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)
