"""Starting the workers of a run, here, in emulated hosts or over ssh, waiting for them, and saying why they ended."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

import torch

from stagewright.errors import RunError
from stagewright.plan import Plan
from stagewright.profiling.detect import memory_bytes, num_cores
from stagewright.profiling.heap import KEPT_LONGER
from stagewright.runtime.checkpoint.storage import checkpoints_in
from stagewright.runtime.launch.environment import RUN_FOLDER, STORE
from stagewright.runtime.launch.leash import hold_leash
from stagewright.runtime.launch.mps import shared_cards
from stagewright.runtime.launch.process import check_server, is_stopped, server_pid, start_process
from stagewright.runtime.launch.ssh import PORT, OverSsh
from stagewright.runtime.run_folder import LOGS, PRIVATE, SCHEDULE_FILE, STATUSES, STOP_FILE, RunFolder, write_text
from stagewright.runtime.safety.diagnosis import Scene
from stagewright.runtime.settings import Settings
from stagewright.schedule import Schedule

_LEAVE_S = 10
"""How long workers may take to end when they are asked to."""


class Hosts(Protocol):
    """Hosts that this machine emulates, with one worker each."""

    @property
    def addresses(self) -> Sequence[str]:
        """For each host the address at which the others find it."""

    def enter(self, host: int) -> None:
        """Moves this process into a host."""

    def environment(self) -> Mapping[str, str]:
        """What workers there find in their environment."""

    def used(self, plan: Plan) -> Sequence[int]:
        """For each worker of a plan its host."""


class _Seat(NamedTuple):
    """What makes a process a certain one of the workers, or the way to those of a host."""

    name: str
    command: Sequence[str]
    variables: Mapping[str, str]
    enter: Callable[[], None] | None = None


def _seats_here(command: Sequence[str], num_workers: int, store: str) -> list[_Seat]:
    """The workers of this host, as torchrun would number them; they meet in a file."""
    common = {"WORLD_SIZE": str(num_workers), "LOCAL_WORLD_SIZE": str(num_workers), "GROUP_RANK": "0", STORE: store}
    return [
        _Seat(f"worker-{rank}", command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_workers)
    ]


def seats_in(command: Sequence[str], hosts: Hosts, used: Sequence[int], port: int = PORT) -> list[_Seat]:
    """A worker in each of the used hosts; they meet at the first one's address."""
    common = {
        **hosts.environment(), "WORLD_SIZE": str(len(used)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts.addresses[used[0]], "MASTER_PORT": str(port),
    }  # fmt: skip
    made = []
    for rank, host in enumerate(used):
        variables = {**common, "RANK": str(rank), "GROUP_RANK": str(host)}
        made.append(_Seat(f"worker-{rank}", command, variables, partial(hosts.enter, host)))
    return made


def _seats_over_ssh(
    command: Sequence[str], hosts: OverSsh, plan: Plan, environment: Mapping[str, str], timeout_s: float
) -> list[_Seat]:
    """The ssh to each host in use: what it starts has its own environment, and outlives ssh unless it is on a leash."""
    given = [f"{key}={value}" for key, value in environment.items() if key.startswith("STAGEWRIGHT_")]
    before = [hosts.python, "-m", "stagewright.runtime.launch.leash", str(timeout_s), "env", *given]
    commands = hosts.commands(command[1:], hosts.workers(plan), before=before)
    return [_Seat(f"host-{number}", each, {}, hold_leash) for number, each in enumerate(commands)]


def launch(
    command: Sequence[str], plan: Plan, folder: Path, settings: Settings, *, hosts: Hosts | OverSsh | None = None,
    share: int = 1, extra: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Starts a worker for each device of the plan and waits for all; raises with the first cause."""
    with launched(command, plan, folder, settings, hosts=hosts, share=share, extra=extra):
        pass


class EndedError(Exception):
    """Raised inside of `launched` by who sees that workers have failed, which is told then."""


@contextmanager
def launched(
    command: Sequence[str], plan: Plan, folder: Path, settings: Settings, *, hosts: Hosts | OverSsh | None = None,
    share: int = 1, extra: Mapping[str, str] | None = None,
) -> Iterator[list[BaseProcess]]:  # fmt: skip
    """A worker for each device of the plan, beside the block; afterwards waits for all, raises with the first cause.

    They run on this host, in hosts that it emulates, or over ssh on hosts that see the run's folder. Each worker's
    output, or each such host's, is in logs/worker-3.log, logs/host-1.log and the like. `share` workers are to fit on a
    card, even where the plan has fewer; `extra` is what workers find in their environment besides.
    """
    for path in (*folder.glob("worker-*.error.json"), *folder.glob("worker-*.flight"), folder / STATUSES):
        path.unlink(missing_ok=True)  # what workers that ran before said about their end
    memory, cards = _MemoryWatch(), 1 if isinstance(hosts, OverSsh) else _workers_a_card(plan, settings, share)
    # The store lies in memory of this process, which no other user can open.
    store = os.fdopen(os.memfd_create("stagewright-store"), "wb")
    with store, shared_cards(cards, settings.transport) as shared:
        environment = {**_worker_environment(plan, folder, settings), **shared, **(extra or {})}
        if isinstance(hosts, OverSsh):
            seats = _seats_over_ssh(command, hosts, plan, environment, settings.timeout_s)
        elif hosts is not None:
            seats = seats_in(command, hosts, hosts.used(plan))
        else:
            seats = _seats_here(command, len(plan.devices), f"/proc/{os.getpid()}/fd/{store.fileno()}")
        with workers(seats, folder / LOGS, environment) as started:
            with suppress(EndedError):
                yield started
            codes = wait_for_workers(started, settings.timeout_s, memory.look)
    if codes and isinstance(hosts, OverSsh):
        number, status = next(iter(codes.items()))
        tail = (folder / LOGS / f"host-{number}.log").read_text(errors="replace").strip().splitlines()[-3:]
        what = f"1 host of {len(seats)} failed: host {number} ended with status {status}"
        failure = RunError(what, "\n".join(tail) or f"its output is in {folder / LOGS}")
        raise _explain(plan, folder, {}, failure, {host: hosts.addresses[host] for host in hosts.lost()})
    if codes:
        statuses = {str(worker): code for worker, code in codes.items()}
        with suppress(OSError):  # a full disk may be the cause, which is told all the same
            write_text(folder / STATUSES, json.dumps({"statuses": statuses, "memory": memory.says()}))
        raise _explain(plan, folder, codes)


def _worker_environment(plan: Plan, folder: Path, settings: Settings) -> dict[str, str]:
    """What workers of this host find in their environment, unless this process has it already."""
    made = {
        RUN_FOLDER: str(folder),
        "OMP_NUM_THREADS": str(settings.threads or max(1, num_cores() // len(plan.devices))),
        "PYTHONUNBUFFERED": "1",
        # Workers started here are all here, whatever hosts the placement names.
        "GLOO_SOCKET_IFNAME": "lo",
        **KEPT_LONGER,
        **({"NCCL_MAX_NCHANNELS": "2"} if settings.device == "cuda" else {}),
    }
    return {key: os.environ.get(key, value) for key, value in made.items()}


def _workers_a_card(plan: Plan, settings: Settings, share: int) -> int:
    """How many workers share a card, at least as many as it is to be shared by; 1 on the CPU."""
    if settings.device == "cpu":
        return 1
    return max(share, -(-len(plan.devices) // max(1, torch.cuda.device_count())))


@contextmanager
def workers(seats: Sequence[_Seat], logs: Path, environment: Mapping[str, str]) -> Iterator[list[BaseProcess]]:
    """Runs what stands in each of the seats; all end with the context."""
    logs.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **environment}
    started: list[BaseProcess] = []
    try:
        for name, command, variables, enter in seats:
            started.append(start_process(name, command, {**own, **variables}, logs / f"{name}.log", enter))
        yield started
    finally:
        _end(started)


def wait_for_workers(
    started: Sequence[BaseProcess], timeout_s: float = Settings().timeout_s,
    look: Callable[[Iterable[int]], None] = lambda processes: None,
) -> dict[int, int]:  # fmt: skip
    """The exit status of the workers that failed, once one has; nothing when all have ended well.

    One that is stopped (SIGSTOP) then is among them, as -SIGSTOP: it cannot have been the others' victim. It may be for
    1.5 timeouts: those who wait for it end sooner, and know at which action. `look` is given the processes about once
    a second.
    """
    stopped_since: dict[int | None, float] = {}
    while alive := {number: worker for number, worker in enumerate(started) if worker.exitcode is None}:
        wait([worker.sentinel for worker in alive.values()], min(1.0, timeout_s / 20))
        check_server(started)
        processes: dict[int | None, int] = {number: worker.pid or 0 for number, worker in alive.items()}
        look(processes.values())
        now, server = time.monotonic(), server_pid() or 0
        processes[None] = server
        stopped = [number for number, process in processes.items() if is_stopped(process)]
        stopped_since = {number: stopped_since.get(number, now) for number in stopped}
        late = [number for number, since in stopped_since.items() if now - since > 1.5 * timeout_s]
        if None in late:
            os.kill(server, signal.SIGKILL)
        elif late or _failed(started):
            time.sleep(0.05)  # for others that fail at the same moment
            return {**{number: -signal.SIGSTOP for number in stopped if number is not None}, **_failed(started)}
    check_server(started)
    return _failed(started)


def _failed(started: Sequence[BaseProcess]) -> dict[int, int]:
    return {number: worker.exitcode for number, worker in enumerate(started) if worker.exitcode}


def _end(started: Sequence[BaseProcess]) -> None:
    """Ends the workers that are left: asks first, but for those that are stopped and hear nothing."""
    server = server_pid()
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = [worker.pid for worker in started if worker.exitcode is None and worker.pid is not None]
        if alive and server is not None and is_stopped(server):
            os.kill(server, signal.SIGKILL)  # it would never tell of their ends, and they go with it
        for process in alive:
            sent = signal.SIGKILL if is_stopped(process) else number
            try:
                os.killpg(process, sent)
            except ProcessLookupError:  # one just forked may not lead a group yet
                with suppress(ProcessLookupError):
                    os.kill(process, sent)
        until = time.monotonic() + _LEAVE_S
        for worker in started:
            worker.join(max(0.0, until - time.monotonic()))


@contextmanager
def stop_on_signals(run: RunFolder) -> Iterator[None]:
    """While the block runs, SIGTERM, SIGUSR1 and Ctrl-C leave the word for the workers to save and stop.

    The word stays until the block ends: workers that are just being started again find it too. A second signal ends the
    block at once. After Ctrl-C the process ends with the status that shells expect of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 2:
            os._exit(128 + number)
        if len(asked) == 2:
            raise SystemExit(128 + number)
        run.state = "stopped"
        write_text(run.path / STOP_FILE, signal.Signals(number).name)
        os.write(2, b"stopping: this step is finished and saved first; once more ends at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with suppress(OSError):
            (run.path / STOP_FILE).unlink(missing_ok=True)
    if signal.SIGINT in asked:
        raise SystemExit(128 + signal.SIGINT)


def _explain(
    plan: Plan, folder: Path, exit_codes: Mapping[int, int], failure: RunError | None = None,
    lost: Mapping[int, str] | None = None,
) -> RunError:  # fmt: skip
    """The first cause in words: which worker or host, where it stood, what it said, and who waited for it.

    `failure` is what is told when nobody is to blame; `lost` are the hosts that do not answer any more.
    """
    path = folder / SCHEDULE_FILE
    schedule = Schedule.load(path) if path.exists() else Schedule(plan=plan, orders=((),) * len(plan.devices))
    scene = Scene.read(schedule, folder, exit_codes)
    found = scene.blame()
    who = f"{scene.name_of(found.worker)} " if found.worker is not None else ""
    what, evidence = f"{who}{found.why}", list(found.evidence)
    if lost:
        names = ", ".join(f"host {host} ({address})" for host, address in lost.items())
        what, evidence = f"{names} does not answer any more", [what, *evidence]
    elif found.worker is None and not evidence and failure is not None:
        what, evidence = failure.what, (failure.todo or "").splitlines()
    cause = f"{what}: {evidence[0]}" if evidence else what
    for path in checkpoints_in(folder, own=True)[:1]:
        evidence.append(f"last checkpoint: {path.name}, go on with --resume auto --out {folder}")
    todo = "\n".join([*evidence, f"its output is in {folder / LOGS}"])
    fault = RunError(what, todo, cause=cause)
    fault.worker, fault.hosts = found.worker if found.is_own else None, tuple(lost or ())
    return fault


class _MemoryWatch:
    """Looks at what the workers of this host occupy while they run."""

    def __init__(self) -> None:
        self._kills_before, self._most_bytes = _number_after("/proc/vmstat", "oom_kill"), 0

    def look(self, processes: Iterable[int]) -> None:
        """Takes note of what the workers occupy now; pages that forks share count once for each, as for the kernel."""
        kibibytes = sum(_number_after(f"/proc/{process}/status", "VmRSS:") for process in processes)
        self._most_bytes = max(self._most_bytes, kibibytes * 1024)

    def says(self) -> str | None:
        """A sentence where the kernel has ended a process for lack of memory since this began."""
        if _number_after("/proc/vmstat", "oom_kill") <= self._kills_before:
            return None
        held = f"workers held up to {self._most_bytes / 2**30:.1f} of " if self._most_bytes else "this host has "
        return (
            f"the kernel ended it, since memory was full: {held}{memory_bytes() / 2**30:.1f} GiB; "
            "use a smaller batch, more microbatches or fewer devices"
        )


def _number_after(file: str, word: str) -> int:
    with suppress(OSError, ValueError):
        for line in Path(file).read_text().splitlines():
            if line.split()[:1] == [word]:
                return int(line.split()[1])
    return 0
