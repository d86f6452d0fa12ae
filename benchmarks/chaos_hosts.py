"""What a run on four hosts survives: hosts, links, launchers, workers and disks that fail, and hosts that come back.

    python -m benchmarks.chaos --hosts [--folder FOLDER] [--minutes 60] [--only ssh/dp] [--at-once 2]

Four hosts and a head are network namespaces on a switch in this process, which can cut, lose and delay what it
passes on. Runs are started over ssh from the head, with a server in each host, or by torchrun's agents in the hosts.
A chain of faults befalls each of them; what is done is kept in the folder, and goes on from there the next time. Needs
root.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.ssh import SSHD, server, write_keys  # noqa: E402

PLANS = {
    "dp": ("0:0,1:0,2:0,3:0", "0", "split"),
    "3-1": ("0:0,1:0,2:0.3:0", "0", "split"),
    "ssp": ("0:0,1:0,2:0.3:0", "ssp", "split"),
    "2 pipelines": ("0:0,1:0.2:0,3:0", "0", "rotate"),
}
LAUNCHERS = ("ssh", "torchrun")
NUM_HOSTS = 4
HEAD = NUM_HOSTS
"""Where the launcher over ssh runs, and the store in which torchrun's agents meet."""
TIMEOUT_S, SLACK_S = 10.0, 4.0
START_S = 400.0
"""How long four hosts may take to come up on a machine of two cores that does other things besides."""
NOT_TRIED = "the run does not get on before the fault"
BATCH, WIDTH, EVERY, STEPS = 24, 16, 5, 1500
PORT, PAUSE_S = 29_400, 0.03


# ── what hosts run ──────────────────────────────────────────────────────────────────────────────────────


def run_training(launcher: str, plan: str, folder: str, pause_s: str) -> None:
    """Trains a small tower in double precision; this is what the tormented processes run."""
    import torch

    import stagewright as sw
    from stagewright.cluster import parse_placement
    from stagewright.plan import parse_staleness
    from stagewright.runtime.launch.ssh import OverSsh

    _slow_down_the_disk(Path(folder).parent / f"slow-{os.environ.get('CHAOS_HOST')}")
    torch.manual_seed(0)
    placement, staleness, route = PLANS[plan]
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 4)).double()

    def rows(batch, start, stop):
        time.sleep(float(pause_s))
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)
        return (inputs[start:stop],), (inputs[start:stop, :4].argmax(dim=1),)

    target, loss = torch.zeros(2, dtype=torch.long), sw.mean_loss(torch.nn.functional.cross_entropy)
    example = torch.zeros(2, WIDTH, dtype=torch.float64)
    layered = sw.make_layered(model, (example,), loss=loss, targets=(target,))
    groups = parse_placement(placement)
    cut = [len(layered.names) * number // len(groups) for number in range(len(groups) + 1)]
    versions = parse_staleness(staleness, len(groups))
    stages = tuple(
        sw.Stage(layers=layered.names[cut[n] : cut[n + 1]], devices=group, versions=versions[n])
        for n, group in enumerate(groups)
    )
    is_undisturbed = float(pause_s) == 0
    job = sw.Job(
        name="chaos", steps=STEPS, checkpoint_every=EVERY, log_every=EVERY, resume="auto", max_restarts=1000,
        keep=100_000 if is_undisturbed else 3, nnodes=f"{NUM_HOSTS - 1}:{NUM_HOSTS}", wait_for_hosts_s=8,
    )  # fmt: skip
    plan_made = sw.Plan(model="chaos", stages=stages, batch=BATCH, num_microbatches=4, route=route)
    sw.train(
        sw.make_schedule(plan_made), layered, data=rows, recipe=sw.Recipe(learning_rate=0.01), job=job, folder=folder,
        hosts=OverSsh(tuple(address_of(host) for host in range(NUM_HOSTS))) if launcher == "ssh" else None,
        settings=sw.Settings(precision="fp64", timeout_s=TIMEOUT_S, start_timeout_s=180, threads=1),
    )  # fmt: skip


def _slow_down_the_disk(word: Path) -> None:
    """Makes this process's disk as slow as a file says, while there is one."""
    bring_to_disk = os.fsync

    def wait(file: int) -> None:
        with suppress(OSError, ValueError):
            time.sleep(float(word.read_text()))
        bring_to_disk(file)

    os.fsync = wait


# ── hosts and their links ───────────────────────────────────────────────────────────────────────────────


def address_of(host: int) -> str:
    return f"10.214.77.{host + 1}"


class Switch(threading.Thread):
    """Passes frames on between hosts, as well as their links let it."""

    def __init__(self, wires: list[int]) -> None:
        super().__init__(name="switch", daemon=True)
        self.wires, self.is_over = wires, False
        self.is_cut = [False] * len(wires)
        self.loss, self.delay_s = [0.0] * len(wires), [0.0] * len(wires)
        self._ports: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        numbers = {wire: number for number, wire in enumerate(self.wires)}
        poll = select.epoll()
        for wire in self.wires:
            poll.register(wire, select.EPOLLIN)
        while not self.is_over:
            wait_s = self._late[0][0] - time.monotonic() if self._late else 0.2
            for wire, _ in poll.poll(min(0.2, max(0.0, wait_s))):
                with suppress(BlockingIOError):
                    for _ in range(64):
                        self._take(numbers[wire], os.read(wire, 1 << 16))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(self._late)
                self._give(port, frame)

    def _take(self, port: int, frame: bytes) -> None:
        """A frame from a host: to the one it is for, or to all where that is not known."""
        self._ports[frame[6:12]] = port
        known = self._ports.get(frame[:6])
        for other in range(len(self.wires)) if known is None else (known,):
            if other == port or self._drops(port) or self._drops(other):
                continue
            delay_s = self.delay_s[port] + self.delay_s[other]
            if delay_s:
                self._count += 1
                heapq.heappush(self._late, (time.monotonic() + delay_s, self._count, other, frame))
            else:
                self._give(other, frame)

    def _drops(self, port: int) -> bool:
        return self.is_cut[port] or (self.loss[port] > 0 and random.random() < self.loss[port])

    def _give(self, port: int, frame: bytes) -> None:
        with suppress(OSError):  # a full queue is a loss too
            os.write(self.wires[port], frame)


class Fleet:
    """The hosts, the head, and the switch between them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.networks: list[int] = []
        """Each host's namespace, which lives for as long as it is open."""
        self.switch = Switch([self._make(host) for host in range(NUM_HOSTS + 1)])
        self.switch.start()
        shutil.rmtree(home / "keys", ignore_errors=True)
        if SSHD is not None:
            write_keys(home / "keys")
        for host in range(NUM_HOSTS):
            self.start_server(host)

    def _make(self, host: int) -> int:
        """Makes a host's network, and returns the other end of its wire."""
        made = list[int]()

        def make() -> None:  # in a thread: only that is moved
            if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):
                raise OSError(ctypes.get_errno(), "cannot make a network of its own")
            self.networks.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(wire, 0x400454CA, struct.pack("16sH", b"wire", 0x0002 | 0x1000))  # a tap, frames alone
            with socket.socket() as probe:
                for what, text in ((0x8916, address_of(host)), (0x891C, "255.255.255.0")):  # address and mask
                    given = struct.pack("16sHH4s8x", b"wire", socket.AF_INET, 0, socket.inet_aton(text))
                    fcntl.ioctl(probe, what, given)
                fcntl.ioctl(probe, 0x8922, struct.pack("16si", b"wire", 9000))  # MTU
                for name in (b"lo", b"wire"):
                    fcntl.ioctl(probe, 0x8914, struct.pack("16sh", name, 0x1 | 0x40))  # up, running
            made.append(wire)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def enter(self, host: int) -> None:
        """Moves this process into a host."""
        if ctypes.CDLL(None, use_errno=True).setns(self.networks[host], 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter host {host}")

    def start_server(self, host: int) -> None:
        """Starts a host's ssh server; runs by torchrun need none."""
        if SSHD is not None:
            command = server(self.home / "keys", str(host), **self.environment(host))
            self.servers[host] = self.start(host, command, self.home / f"sshd-{host}.log")

    def environment(self, host: int) -> dict[str, str]:
        """What everything in a host finds in its environment."""
        return {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path[1:]]), "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1", "CHAOS_HOST": str(host), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PATH": f"{self.home / 'keys'}:{os.environ['PATH']}",
        }  # fmt: skip

    def start(self, host: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a command in a host, its output added to a file."""
        with log.open("ab") as file:
            return subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, **self.environment(host)},
                preexec_fn=partial(self.enter, host),
            )  # fmt: skip

    def processes_in(self, host: int, *, everything: bool = False) -> list[int]:
        """What runs in a host, but for its ssh server and what that has for each connection."""
        network, found = os.fstat(self.networks[host]).st_ino, []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.stat(entry / "ns" / "net").st_ino == network:
                    is_server = (entry / "comm").read_text().startswith("sshd")
                    found += [] if is_server and not everything else [int(entry.name)]
        return found

    def workers_in(self, host: int) -> list[int]:
        """The workers in a host."""
        found = []
        for pid in self.processes_in(host):
            with suppress(OSError):
                if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def kill(self, host: int) -> None:
        """The host loses its power: its link goes first, so nobody hears of it."""
        self.switch.is_cut[host] = True
        self.end(host)

    def end(self, host: int) -> None:
        """Ends all that runs in a host, its ssh server too."""
        self.servers.pop(host, None)
        until = time.monotonic() + 10
        while (left := self.processes_in(host, everything=True)) and time.monotonic() < until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def close(self) -> None:
        for host in range(NUM_HOSTS + 1):
            self.end(host)
        self.switch.is_over = True
        self.switch.join(2)
        for file in (*self.switch.wires, *self.networks):
            os.close(file)


@contextmanager
def fleet_of(home: Path) -> Iterator[Fleet]:
    """Hosts for as long as the block runs."""
    home.mkdir(parents=True, exist_ok=True)
    fleet = Fleet(home)
    try:
        yield fleet
    finally:
        fleet.close()


# ── a run on them ───────────────────────────────────────────────────────────────────────────────────────


class Run:
    """A run on the hosts of a fleet, started as people would."""

    def __init__(self, fleet: Fleet, launcher: str, plan: str, folder: Path, pause_s: float) -> None:
        self.fleet, self.launcher, self.plan, self.folder = fleet, launcher, plan, folder
        self._words = ["run", launcher, plan, str(folder), str(pause_s)]
        self.logs = folder.parent / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        """The launcher in the head, or an agent in each host."""
        self._store: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts what is not there: the launcher, or the agents of hosts whose link is whole, and their servers."""
        for host in range(NUM_HOSTS):
            if host not in self.fleet.servers and not self.fleet.switch.is_cut[host]:
                self.fleet.start_server(host)
        if self.launcher == "ssh":
            self.agents = {HEAD: self.fleet.start(HEAD, [sys.executable, __file__, *self._words], self.log_of(HEAD))}
            return
        if self._store is None:
            code = (
                "import sys, time, torch.distributed as d; "
                "s = d.TCPStore('0.0.0.0', int(sys.argv[1]), is_master=True, wait_for_workers=False); time.sleep(1e6)"
            )
            self._store = self.fleet.start(HEAD, [sys.executable, "-c", code, str(PORT)], self.log_of(HEAD))
        for host in range(NUM_HOSTS):
            if not self.fleet.switch.is_cut[host]:
                self.start_agent(host)

    def start_agent(self, host: int) -> None:
        """Starts torchrun in a host, unless it runs."""
        if host in self.agents and self.agents[host].poll() is None:
            return
        conf = "is_host=0,last_call_timeout=5,join_timeout=120"
        words = [
            f"--nnodes={NUM_HOSTS - 1}:{NUM_HOSTS}", "--nproc-per-node=1", "--max-restarts=1000",
            "--shutdown-timeout=5",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={address_of(HEAD)}:{PORT}", f"--rdzv-id={self.folder.name}",
            f"--rdzv-conf={conf}", f"--local-addr={address_of(host)}", __file__, *self._words,
        ]  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        self.agents[host] = self.fleet.start(host, command, self.log_of(host))

    def log_of(self, host: int) -> Path:
        return self.logs / f"{self.folder.name}-{host}.log"

    def signal(self, number: signal.Signals, host: int | None = None) -> None:
        """Sends a signal to the launchers, or to that of one host."""
        for each, agent in self.agents.items():
            if host in (None, each):
                with suppress(ProcessLookupError):
                    os.kill(agent.pid, number)

    def step(self) -> int:
        """The last step that was saved."""
        names = [path.name for path in (self.folder / "checkpoints").glob("step-*")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def workers(self) -> dict[int, list[int]]:
        return {host: self.fleet.workers_in(host) for host in range(NUM_HOSTS)}

    def pids(self) -> set[int]:
        """All that the launcher has started; torchrun's agents are launchers themselves."""
        found = self.workers() if self.launcher == "torchrun" else {
            host: self.fleet.processes_in(host) for host in range(NUM_HOSTS)
        }  # fmt: skip
        return {pid for each in found.values() for pid in each}

    def said(self, since: dict[Path, int], without: int | None = None) -> str:
        """What launchers and agents have said since."""
        found = []
        for path, start in since.items():
            if without is None or path != self.log_of(without):
                with suppress(OSError), path.open("rb") as file:
                    file.seek(start)
                    found.append(file.read().decode(errors="replace"))
        return "\n".join(found)

    def sizes(self) -> dict[Path, int]:
        logs = [self.log_of(host) for host in range(NUM_HOSTS + 1)]
        return {path: path.stat().st_size if path.exists() else 0 for path in logs}

    def is_over(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents.values())

    def end(self) -> None:
        """Ends everything, in order if it can be."""
        self.signal(signal.SIGTERM)
        wait_for(self.is_over, 25)
        for host in range(NUM_HOSTS + 1):
            self.fleet.end(host)
        for agent in (*self.agents.values(), *([self._store] if self._store else [])):
            agent.wait(10)
        self._store = None


def wait_for(is_so: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until something is so; None where it is not in time."""
    started = time.monotonic()
    while not is_so():
        if time.monotonic() - started > limit_s:
            return None
        time.sleep(0.1)
    return time.monotonic() - started


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Case:
    """What came of one fault."""

    launcher: str
    plan: str
    fault: str
    outcome: str = ""
    ended_s: float | None = None
    """After how long nothing of before was left; None where the run went on."""
    named: bool | None = None
    """Whether the right one was named; None where there is nobody to name."""
    weights: str = ""
    wrong: str = ""
    """What was promised and did not come."""
    said: str = ""


@dataclass(frozen=True)
class Fault:
    """How something is broken and put right."""

    do: Callable[[Run, int], None]
    undo: Callable[[Run, int], None] = lambda run, host: None
    lasts_s: float = 0.0
    culprit: str = "host"
    """Who is to be named when the run is ended by it: the host, or none."""
    must_be_named: bool = False
    """Whether it has to be named even where the run goes on."""
    ends: int | None = None
    """The status with which the launcher ends; None where it does not."""


def _cut(run: Run, host: int) -> None:
    run.fleet.switch.is_cut[host] = True


def _mend(run: Run, host: int) -> None:
    switch = run.fleet.switch
    switch.is_cut[host], switch.loss[host], switch.delay_s[host] = False, 0.0, 0.0


def _lose(run: Run, host: int) -> None:
    run.fleet.switch.loss[host] = 0.3


def _delay(run: Run, host: int) -> None:
    run.fleet.switch.delay_s[host] = 0.5


def _come_back(run: Run, host: int) -> None:
    """A host in the place of one that was lost: its link, its server, and with torchrun its agent."""
    run.fleet.end(host)
    _mend(run, host)
    if host not in run.fleet.servers:
        run.fleet.start_server(host)
    if run.launcher == "torchrun":
        run.start_agent(host)


def _limit_files(run: Run, host: int, *, limit: int) -> None:
    for pid in run.fleet.workers_in(host):
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def _stop_worker(run: Run, host: int) -> None:
    for pid in run.fleet.workers_in(host):
        os.kill(pid, signal.SIGSTOP)


def _signal_launcher(number: signal.Signals, run: Run, host: int) -> None:
    # A scheduler tells all agents; one that is killed dies alone.
    run.signal(number, host if number == signal.SIGKILL and run.launcher == "torchrun" else None)


def _start_again(run: Run, host: int) -> None:
    run.start()


def _slow(run: Run, host: int) -> None:
    (run.folder.parent / f"slow-{host}").write_text(str(1.5 * TIMEOUT_S))


def _quick(run: Run, host: int) -> None:
    (run.folder.parent / f"slow-{host}").unlink(missing_ok=True)


FAULTS: dict[str, Fault] = {
    "loss of 30 %": Fault(_lose, _mend, 10),
    "latency of 500 ms": Fault(_delay, _mend, 10),
    "disk slow": Fault(_slow, _quick, 1.6 * TIMEOUT_S, must_be_named=True),
    "disk full": Fault(partial(_limit_files, limit=1000), partial(_limit_files, limit=-1), 6, must_be_named=True),
    "launcher stopped": Fault(partial(_signal_launcher, signal.SIGTERM), _start_again, culprit="none", ends=0),
    "launcher interrupted": Fault(partial(_signal_launcher, signal.SIGINT), _start_again, culprit="none", ends=130),
    "launcher killed": Fault(partial(_signal_launcher, signal.SIGKILL), _start_again, culprit="none", ends=-9),
    "worker stopped": Fault(_stop_worker),
    "cut for 9 s": Fault(_cut, _mend, 9),
    "host replaced": Fault(lambda run, host: run.fleet.kill(host), _come_back, 5),
    "cut for good": Fault(_cut),
    "host added": Fault(_come_back, culprit="none"),
    "host killed": Fault(lambda run, host: run.fleet.kill(host)),
}  # fmt: skip
"""In the order in which they befall a run: the last three change its plan."""
WITHOUT_A_HOST = ("cut for good", "host killed")


class Chain:
    """The faults that befall the runs of one launcher and one plan, one after another."""

    def __init__(self, fleet: Fleet, launcher: str, plan: str, home: Path) -> None:
        self.fleet, self.launcher, self.plan, self.home = fleet, launcher, plan, home
        self.draw = random.Random(f"{launcher} {plan}")
        self.victim = 0
        self.run = self._new_run()
        self.is_same_plan = True

    def _new_run(self) -> Run:
        number = len(list((self.home / "runs").glob("run-*"))) if (self.home / "runs").exists() else 0
        newest = self.home / "runs" / f"run-{max(number, 1)}"
        run = Run(self.fleet, self.launcher, self.plan, newest, PAUSE_S)
        if run.step() > STEPS * 0.7 or (self.home / "runs" / "plan-changed").exists():
            (self.home / "runs" / "plan-changed").unlink(missing_ok=True)
            run = Run(self.fleet, self.launcher, self.plan, newest.with_name(f"run-{number + 1}"), PAUSE_S)
        return run

    def befall(self, name: str) -> Case:
        """One fault, and what comes of it."""
        case, fault = Case(self.launcher, self.plan, name), FAULTS[name]
        if name != "host added":
            self.victim = self.draw.randrange(NUM_HOSTS)
        if not self._is_running():
            return self._failed(case, NOT_TRIED)
        run, since, before, step = self.run, self.run.sizes(), self.run.pids(), self.run.step()
        fault.do(run, self.victim)
        started = time.monotonic()
        if fault.lasts_s:
            threading.Timer(fault.lasts_s, fault.undo, (run, self.victim)).start()
        limit_s = 1.5 * TIMEOUT_S + SLACK_S
        patience_s = limit_s + max(fault.lasts_s, 60 if name == "host added" else 0)
        is_agent_killed = name == "launcher killed" and self.launcher == "torchrun"

        def settled() -> bool:
            is_past = time.monotonic() - started > fault.lasts_s + 1
            went_on = is_past and run.step() >= step + 3 * EVERY and bool(before & run.pids())
            return not before & run.pids() or (
                went_on and fault.ends is None and name not in ("host added", *WITHOUT_A_HOST)
            )

        wait_for(settled, patience_s)
        left = before & run.pids()
        case.ended_s = None if left else round(time.monotonic() - started, 1)
        case.outcome = "went on" if left else "ended"
        if left and run.step() < step + 3 * EVERY:
            case.wrong = f"{len(left)} processes of before are left after {patience_s:.0f} s: {_names(left)}"
        elif not left and case.ended_s > limit_s and name not in ("host added", "disk slow"):
            case.wrong = f"all ended after {case.ended_s:.1f} s only"
        if fault.ends is not None and not is_agent_killed:
            self._check_end(case, fault)
        if not fault.lasts_s:
            fault.undo(run, self.victim)
        wait_for(lambda: time.monotonic() - started > fault.lasts_s + 1, 30)
        self._check_going_on(case, step if fault.ends is None else run.step())
        case.said = run.said(since)
        # A host that is cut off blames all others, and nobody reads it.
        heard = run.said(since, without=None if fault.must_be_named else self.victim)
        case.named = self._is_named(case, fault, heard)
        self._check_weights(case, name)
        return case

    def _is_running(self) -> bool:
        """Starts the run if it does not run, and waits until it gets on."""
        if self.run.step() > STEPS * 0.8:
            self.run.end()
            self.run = self._new_run()
        if self.run.is_over() or not self.run.agents:
            self.run.start()
        step = self.run.step()
        wanted = 3 if any(self.fleet.switch.is_cut) else NUM_HOSTS

        def gets_on() -> bool:
            there = sum(map(bool, self.run.workers().values()))
            return self.run.step() >= step + 2 * EVERY and there >= wanted

        return wait_for(lambda: gets_on() or self.run.is_over(), START_S) is not None and not self.run.is_over()

    def _check_end(self, case: Case, fault: Fault) -> None:
        """The launcher's own end, and that nothing is left anywhere."""
        run = self.run
        ended = wait_for(run.is_over, 30)
        codes = {host: agent.poll() for host, agent in run.agents.items()}
        case.outcome = f"ended, status {sorted(map(str, set(codes.values())))}"
        if ended is None:
            case.wrong = case.wrong or f"launchers did not end: {codes}"
            run.signal(signal.SIGKILL)
            wait_for(run.is_over, 5)
        elif self.launcher == "ssh" and set(codes.values()) != {fault.ends}:
            case.wrong = case.wrong or f"the launcher ended with {codes}"
        left = [pid for host in range(NUM_HOSTS) for pid in self.fleet.processes_in(host)]
        if left:
            case.wrong = case.wrong or f"left in the hosts: {_names(left)}"

    def _check_going_on(self, case: Case, step: int) -> None:
        """New steps are saved again, on as many hosts as there are."""
        run = self.run
        wanted = NUM_HOSTS - sum(self.fleet.switch.is_cut)

        def gets_on() -> bool:
            return run.step() > step + 2 * EVERY and sum(map(bool, run.workers().values())) == wanted

        if wait_for(lambda: gets_on() or run.is_over(), START_S) is None or run.is_over():
            how = "it ended" if run.is_over() else f"at step {run.step()} after {step}, workers {run.workers()}"
            case.wrong = case.wrong or f"the run did not go on with {wanted} hosts: {how}"
        elif not case.outcome.startswith("went on"):
            case.outcome += ", went on again"

    def _is_named(self, case: Case, fault: Fault, said: str) -> bool | None:
        """Whether what was said names the victim, and it more often than anyone else."""
        if fault.culprit == "none" or (case.outcome == "went on" and not fault.must_be_named):
            return None
        address = re.escape(address_of(self.victim))
        told = [line for line in said.splitlines() if not line.startswith(("resume:", "transport:", "train:"))]
        votes = _accused("\n".join(told))
        rightly = sum(1 for who in votes if who in (str(self.victim), address_of(self.victim)))
        case.said += f"\naccused: {votes}"
        return bool(rightly and rightly > len(votes) / 2) or bool(
            fault.must_be_named and re.search(rf"worker {self.victim}\b|{address}", "\n".join(told))
        )

    def _check_weights(self, case: Case, name: str) -> None:
        """The newest weights are the undisturbed run's after so many steps: to the bit, or to rounding."""
        self.is_same_plan = self.is_same_plan and name not in WITHOUT_A_HOST
        if name in WITHOUT_A_HOST:
            (self.home / "runs" / "plan-changed").touch()
        case.weights, difference = compare(self.run, undisturbed(self.home.parent, self.plan))
        if case.weights != "same bits" and (self.is_same_plan or difference > 1e-9):
            case.wrong = case.wrong or f"the weights differ by {difference:.1e} ({case.weights})"

    @staticmethod
    def _failed(case: Case, why: str) -> Case:
        case.wrong = why
        return case


def _names(pids: object) -> str:
    found = []
    for pid in sorted(pids)[:4]:
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-60:])
    return "; ".join(found)


def _accused(said: str) -> list[str]:
    """Whom the messages accuse: hosts by address, of whom nothing comes or nothing is confirmed, workers by number."""
    lost = re.findall(r"hosts? ([^;:]*?\([\d.]+\)) (?:does not answer|does not confirm|are cut off|and )", said)
    found = [address for text in lost for address in re.findall(r"\(([\d.]+)\)", text)]
    if not found:
        found = re.findall(r"(?:restart|replan|hosts|error): (?:worker|host) (\d+) (?!waited)", said)
    return found or re.findall(r"waited at .* for worker (\d+)", said)


def undisturbed(folder: Path, plan: str) -> Path:
    """The folder of the run that no fault befalls."""
    return folder / f"undisturbed-{plan}".replace(" ", "-")


def is_whole(reference: Path) -> bool:
    """Whether the undisturbed run has come to its end."""
    return (reference / "checkpoints" / f"step-{STEPS:08d}").exists()


def compare(run: Run, reference: Path) -> tuple[str, float]:
    """How the newest good weights compare with those of the undisturbed run, and the largest difference."""
    import torch

    from stagewright.errors import CheckpointError
    from stagewright.runtime.checkpoint.resuming import whole_model

    for _ in range(400):  # until the next one that both have: the last one may have been saved at a stop
        step = run.step()
        try:
            found = whole_model(run.folder / "checkpoints" / f"step-{step:08d}")
            expected = whole_model(reference / "checkpoints" / f"step-{step:08d}")
            break
        except (CheckpointError, OSError):  # it is being written, was removed, or was saved when the run was stopped
            time.sleep(0.2)
    else:
        return f"nothing to compare at step {step}", 1.0
    difference = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    same = all(torch.equal(found[name], expected[name]) for name in expected)
    return "same bits" if same else "to rounding" if difference < 1e-9 else f"apart at step {step}", difference


# ── all of them ─────────────────────────────────────────────────────────────────────────────────────────


def run_chain(launcher: str, plan: str, folder: str, seconds: str, *names: str) -> None:
    """What is left of a chain, as far as the time goes; each case is added to the folder's file."""
    deadline, home = time.monotonic() + float(seconds), Path(folder) / f"{launcher} {plan}".replace(" ", "-")
    with fleet_of(home) as fleet:
        reference = undisturbed(Path(folder), plan)
        if not is_whole(reference):
            run = Run(fleet, "torchrun", plan, reference, 0)
            run.start()
            wait_for(run.is_over, max(30.0, float(seconds)))
            run.end()
            if run.step() < STEPS:
                sys.exit(f"the undisturbed run of {plan} got to step {run.step()} only: see {run.logs}")
        chain = Chain(fleet, launcher, plan, home)
        done = tried(Path(folder))
        for name in FAULTS:
            if (launcher, plan, name) in done or (names and name not in names) or time.monotonic() > deadline:
                continue
            if name == "host added" and not any(fleet.switch.is_cut):
                chain.victim = chain.draw.randrange(NUM_HOSTS)
                fleet.kill(chain.victim)  # it is missing from the beginning
            case = chain.befall(name)
            with (Path(folder) / "cases.jsonl").open("a") as file:
                file.write(json.dumps({**asdict(case), "said": ""}) + "\n")
            (home / f"{name}.log").write_text(case.said)
            print(f"{time.strftime('%H:%M:%S')} {launcher} {plan}, {name}: {case.outcome}; {case.wrong or 'kept'}"
                  f"; named {case.named}", file=sys.stderr, flush=True)  # fmt: skip
        chain.run.end()


def finished(folder: Path) -> list[Case]:
    """The cases that are done; of one that was done again the last."""
    path = folder / "cases.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    cases = [Case(**json.loads(line)) for line in lines]
    return list({(case.launcher, case.plan, case.fault): case for case in cases}.values())


def tried(folder: Path) -> set[tuple[str, str, str]]:
    """The faults that were done to a run, by launcher, plan and name."""
    return {(case.launcher, case.plan, case.fault) for case in finished(folder) if case.wrong != NOT_TRIED}


def run_all(words: list[str]) -> int:
    """Runs what is not done yet, some chains at once, and prints the table."""
    asked = argparse.ArgumentParser(
        prog="chaos --hosts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("--folder", type=Path, default=Path("results/chaos-hosts"))
    asked.add_argument("--minutes", type=float, default=60.0)
    asked.add_argument("--only", default="", help="chains whose names have one of these, such as ssh/dp,ssp")
    asked.add_argument("--faults", default="", help="faults, by name, separated by commas")
    asked.add_argument("--at-once", type=int, default=2)
    chosen = asked.parse_args(words)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * chosen.minutes
    names = [name for name in chosen.faults.split(",") if name]
    chains = [(launcher, plan) for plan in PLANS for launcher in LAUNCHERS]
    waiting = [pair for pair in chains if any(part in "/".join(pair) for part in chosen.only.split(","))]
    done = tried(chosen.folder)
    waiting = [pair for pair in waiting if any((*pair, name) not in done for name in names or FAULTS)]
    running: list[tuple[subprocess.Popen[bytes], str]] = []
    try:
        while (waiting or running) and (running or time.monotonic() < deadline):
            running = [(process, plan) for process, plan in running if process.poll() is None]
            # Two chains of a plan share the undisturbed run, which one of them makes.
            busy = [plan for _, plan in running if not is_whole(undisturbed(chosen.folder, plan))]
            free = [pair for pair in waiting if pair[1] not in busy]
            if free and len(running) < chosen.at_once and time.monotonic() < deadline:
                pair = free[0]
                waiting.remove(pair)
                seconds = str(max(1.0, deadline - time.monotonic()))
                words = ["chain", *pair, str(chosen.folder.resolve()), seconds, *names]
                running.append((subprocess.Popen([sys.executable, __file__, *words], cwd=ROOT), pair[1]))
            time.sleep(0.5)
    finally:
        for process, _ in running:
            process.terminate()
            process.wait(60)
    return show(finished(chosen.folder))


def show(cases: list[Case]) -> int:
    """Prints the table; 1 when a promise was broken."""
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "cases", "went on / ended", "longest end", "named", "weights", "broken", box=None)
    for name in FAULTS:
        those = [case for case in cases if case.fault == name]
        ends = [case.ended_s for case in those if case.ended_s is not None]
        asked = [case.named for case in those if case.named is not None]
        table.add_row(
            name, str(len(those)), f"{len(those) - len(ends)} / {len(ends)}",
            f"{max(ends) / TIMEOUT_S:.2f} timeouts" if ends else "–", f"{sum(asked)} of {len(asked)}" if asked else "–",
            ", ".join(sorted({case.weights for case in those})), str(sum(bool(case.wrong) for case in those)),
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    for case in cases:
        if case.wrong or case.named is False:
            text = case.wrong or "the wrong one was named"
            console.print(f"{case.launcher} {case.plan}, {case.fault}: {text}", markup=False, highlight=False)
    named = [case.named for case in cases if case.named is not None]
    kept = sum(not case.wrong for case in cases)
    console.print(f"{len(cases)} faults: promises kept in {kept}; {sum(named)} of {len(named)} named rightly")
    return int(kept < len(cases))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was made is removed
    if sys.argv[1:2] == ["run"]:
        run_training(*sys.argv[2:])
    elif sys.argv[1:2] == ["chain"]:
        run_chain(*sys.argv[2:])
