"""Starting workers of this machine, and waiting for them."""

from __future__ import annotations

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

from stagewright.errors import RunError
from stagewright.plan import Plan
from stagewright.runtime.checkpoint.storage import checkpoints_in
from stagewright.runtime.launch.environment import STORE
from stagewright.runtime.launch.process import check_server, is_stopped, server_pid, start_process
from stagewright.runtime.run_folder import LOGS, PRIVATE, RunFolder
from stagewright.runtime.safety.diagnosis import MemoryWatch, blame, keep_statuses, name_of
from stagewright.runtime.safety.flight import SCHEDULE_FILE, STATUSES, STOP_FILE, write_text
from stagewright.runtime.settings import Settings
from stagewright.schedule import Schedule

PORT = 29_400
"""Where the workers of several hosts meet."""
LEAVE_S = 10
"""How long workers may take to end when they are asked to."""
_Look = Callable[[Iterable[int]], None]


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
    """What makes a process a certain one of the workers."""

    variables: Mapping[str, str]
    enter: Callable[[], None] | None = None


def _seats_here(num_workers: int, store: str) -> list[_Seat]:
    """The workers of this host, as torchrun would number them; they meet in a file."""
    common = {"WORLD_SIZE": str(num_workers), "LOCAL_WORLD_SIZE": str(num_workers), "GROUP_RANK": "0", STORE: store}
    numbers = map(str, range(num_workers))
    return [_Seat({**common, "RANK": number, "LOCAL_RANK": number}) for number in numbers]


def seats_in(hosts: Hosts, used: Sequence[int], port: int = PORT) -> list[_Seat]:
    """A worker in each of the used hosts; they meet at the first one's address."""
    common = {
        **hosts.environment(), "WORLD_SIZE": str(len(used)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts.addresses[used[0]], "MASTER_PORT": str(port),
    }  # fmt: skip
    return [
        _Seat({**common, "RANK": str(rank), "GROUP_RANK": str(host)}, partial(hosts.enter, host))
        for rank, host in enumerate(used)
    ]


def launch(
    command: Sequence[str], plan: Plan, folder: Path, environment: Mapping[str, str], *, hosts: Hosts | None = None,
    timeout_s: float = Settings().timeout_s,
) -> None:  # fmt: skip
    """Starts a worker for each device of the plan and waits for all; raises with the first cause.

    They run on this host, or in hosts that it emulates. Each worker's output is in logs/worker-3.log and the like.
    """
    clear_words(folder)
    memory = MemoryWatch()
    # The store lies in memory of this process, which no other user can open.
    with os.fdopen(os.memfd_create("stagewright-store"), "wb") as store:
        here = f"/proc/{os.getpid()}/fd/{store.fileno()}"
        seats = _seats_here(len(plan.devices), here) if hosts is None else seats_in(hosts, hosts.used(plan))
        with workers(command, seats, folder / LOGS, environment) as started:
            codes = wait_for_workers(started, timeout_s, memory.look)
    if codes:
        keep_statuses(folder, codes, memory.says())
        raise explain(plan, folder, codes)


@contextmanager
def workers(
    command: Sequence[str], seats: Sequence[_Seat], logs: Path, environment: Mapping[str, str]
) -> Iterator[list[BaseProcess]]:
    """Runs a command as every one of the workers; all end with the context."""
    logs.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **environment}
    started: list[BaseProcess] = []
    try:
        for number, (variables, enter) in enumerate(seats):
            name = f"worker-{number}"
            started.append(start_process(name, command, {**own, **variables}, logs / f"{name}.log", enter))
        yield started
    finally:
        _end(started)


def wait_for_workers(
    started: Sequence[BaseProcess], timeout_s: float = Settings().timeout_s, look: _Look = lambda processes: None
) -> dict[int, int]:
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
        until = time.monotonic() + LEAVE_S
        for worker in started:
            worker.join(max(0.0, until - time.monotonic()))


def clear_words(folder: Path) -> None:
    """Removes what workers that ran before said about their end."""
    for path in (*folder.glob("worker-*.error.json"), *folder.glob("worker-*.flight"), folder / STATUSES):
        path.unlink(missing_ok=True)


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


def explain(
    plan: Plan, folder: Path, exit_codes: Mapping[int, int], failure: RunError | None = None,
    lost: Mapping[int, str] | None = None,
) -> RunError:  # fmt: skip
    """The first cause in words: which worker or host, where it stood, what it said, and who waited for it.

    `failure` is what is told when nobody is to blame; `lost` are the hosts that do not answer any more.
    """
    path = folder / SCHEDULE_FILE
    schedule = Schedule.load(path) if path.exists() else Schedule(plan=plan, orders=((),) * len(plan.devices))
    found = blame(schedule, folder, exit_codes)
    who = f"{name_of(schedule.plan, found.worker)} " if found.worker is not None else ""
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
