"""Starting workers of this machine, and being one of those that this, torchrun or SLURM started.

this process          RANK is set     SLURM_PROCID is set     neither
is                    a worker        a worker                the one that starts workers of its own
"""

from __future__ import annotations

import os
import re
import signal
import sys
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
from stagewright.profiling.heap import KEPT_LONGER
from stagewright.runtime.diagnosis import blame, keep_statuses, name_of
from stagewright.runtime.flight import SCHEDULE_FILE, STATUSES, STOP_FILE, write_text
from stagewright.runtime.out_of_memory import MemoryWatch
from stagewright.runtime.process import check_server, is_stopped, server_pid, start_process
from stagewright.runtime.run_folder import LOGS, PRIVATE, RunFolder
from stagewright.runtime.settings import Settings
from stagewright.schedule import Schedule

RUN_FOLDER = "STAGEWRIGHT_RUN_FOLDER"
"""The variable that tells workers where the run keeps its files."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SCHEDULE = "STAGEWRIGHT_SCHEDULE"
"""The variable that names a file whose schedule workers use instead of their own."""
STORE = "STAGEWRIGHT_STORE"
"""The variable that names the file in which the workers of one host meet."""
PORT = 29_400
"""Where the workers of several hosts meet."""
_STOPPED_GRACE = 1.5
"""So many timeouts a worker may be stopped (SIGSTOP). Those who wait for it end sooner, and know at which action."""
LEAVE_S = 10
"""How long workers may take to end when they are asked to."""
_Look = Callable[[Iterable[int]], None]


def is_worker() -> bool:
    """Whether a launcher started this process as a worker; SLURM's variables are turned into torch's."""
    if "RANK" in os.environ:
        return True
    if "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        os.environ.update(_from_slurm(os.environ))
        return True
    return False


def is_main() -> bool:
    """Whether this process is the one that prints and saves for all: the one that starts workers, or else worker 0.

    What follows `train` in a script runs in every worker. Those that are started here run beside the one that started
    them, whose word it is; under torchrun or SLURM there is none, and worker 0 speaks.
    """
    return not is_worker() or (RUN_FOLDER not in os.environ and os.environ["RANK"] == "0")


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables out of SLURM's: the first host of the job is where the workers meet."""
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
    job = int(environment.get("SLURM_JOB_ID", "0") or 0)
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", _first_host(hosts)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + job % 20_000)),
    }


def _first_host(hosts: str) -> str:
    """The first of hosts as SLURM writes them."""
    return next(iter(expand_hosts(hosts)), "localhost")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Every host that a list names: `gpu[03-05,9],other` is gpu03, gpu04, gpu05, gpu9 and other."""
    words = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    return tuple(name for word in words for name in _expand_host(word))


def _expand_host(word: str) -> list[str]:
    """The hosts of one word, whatever stands before, between and after its brackets: `rack[1-2]node[01-04]-ib`."""
    match = re.search(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]", word)
    if match is None:
        return [word]
    spans = (part.partition("-") for part in match[1].split(","))
    numbers = [
        str(number).zfill(len(first))
        for first, _, last in spans
        for number in range(int(first), int(last or first) + 1)
    ]
    return [
        f"{word[: match.start()]}{number}{rest}" for number in numbers for rest in _expand_host(word[match.end() :])
    ]


def this_command() -> list[str]:
    """The command that started this process, to start workers with."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        name = spec.name.removesuffix(".__main__")
        return [sys.executable, "-m", name, *sys.argv[1:]]
    script = getattr(main, "__file__", None)
    if not script or not Path(script).is_file():
        source = "it came on standard input" if script == "<stdin>" else "this Python session has none"
        raise RunError(
            f"workers run the script again, but {source}",
            "put the training into a file, or start the workers with torchrun",
        )
    return [sys.executable, *sys.argv]


def worker_environment(plan: Plan, folder: Path, *, threads: int | None, device: str) -> dict[str, str]:
    """What workers of this host find in their environment beside what is there already."""
    workers = len(plan.devices)
    cores = len(os.sched_getaffinity(0))
    made = {
        RUN_FOLDER: str(folder),
        "OMP_NUM_THREADS": str(threads or max(1, cores // workers)),
        "PYTHONUNBUFFERED": "1",
        # Workers started here are all here, whatever hosts the placement names.
        "GLOO_SOCKET_IFNAME": "lo",
        **KEPT_LONGER,
    }
    if device == "cuda":
        made["NCCL_MAX_NCHANNELS"] = "2"
    return {key: os.environ.get(key, value) for key, value in made.items()}


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


def seats_here(num_workers: int, store: str) -> list[_Seat]:
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
        seats = seats_here(len(plan.devices), here) if hosts is None else seats_in(hosts, hosts.used(plan))
        with workers(command, seats, folder / LOGS, environment, timeout_s) as started:
            codes = wait_for_workers(started, timeout_s, memory.look)
    if codes:
        keep_statuses(folder, codes, memory.says())
        raise explain(plan, folder, codes)


@contextmanager
def workers(
    command: Sequence[str],
    seats: Sequence[_Seat],
    logs: Path,
    environment: Mapping[str, str],
    timeout_s: float = Settings().timeout_s,
) -> Iterator[list[BaseProcess]]:
    """Runs a command as every one of the workers; all end with the context."""
    logs.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **environment}
    started: list[BaseProcess] = []
    is_over = threading.Event()
    threading.Thread(target=_end_stopped_server, args=(timeout_s * _STOPPED_GRACE, is_over), daemon=True).start()
    try:
        for number, (variables, enter) in enumerate(seats):
            name = f"worker-{number}"
            started.append(start_process(name, command, {**own, **variables}, logs / f"{name}.log", enter))
        yield started
    finally:
        is_over.set()
        _end(started)


def _end_stopped_server(patience_s: float, is_over: threading.Event) -> None:
    """Ends the process that workers are forked of once it was stopped (SIGSTOP) for too long."""
    period_s = min(1.0, patience_s / 20)
    silent_s = 0.0
    while not is_over.wait(period_s):
        server = server_pid()
        silent_s = silent_s + period_s if server is not None and is_stopped(server) else 0.0
        if server is not None and silent_s > patience_s:
            os.kill(server, signal.SIGKILL)


def wait_for_workers(
    started: Sequence[BaseProcess], timeout_s: float = Settings().timeout_s, look: _Look = lambda processes: None
) -> dict[int, int]:
    """The exit status of the workers that failed, once one has; nothing when all have ended well.

    One that is stopped then is among them, as -SIGSTOP: it cannot have been the others' victim. `look` is given the
    processes about once a second.
    """
    stopped_since: dict[int, float] = {}
    while alive := {number: worker for number, worker in enumerate(started) if worker.exitcode is None}:
        wait([worker.sentinel for worker in alive.values()], min(1.0, timeout_s / 20))
        check_server(started)
        look(worker.pid or 0 for worker in alive.values())
        now = time.monotonic()
        stopped = [number for number, worker in alive.items() if is_stopped(worker.pid or 0)]
        stopped_since = {number: stopped_since.get(number, now) for number in stopped}
        is_late = any(now - since > timeout_s * _STOPPED_GRACE for since in stopped_since.values())
        if is_late or _failed(started):
            time.sleep(0.05)  # for others that fail at the same moment
            return {**dict.fromkeys(stopped, -signal.SIGSTOP), **_failed(started)}
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
            _send(process, signal.SIGKILL if is_stopped(process) else number)
        until = time.monotonic() + LEAVE_S
        for worker in started:
            worker.join(max(0.0, until - time.monotonic()))


def _send(process: int, number: signal.Signals) -> None:
    """Sends a signal to a worker and all it has started; one just forked may not lead a group yet."""
    try:
        os.killpg(process, number)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(process, number)


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

    before = {number: signal.signal(number, ask) for number in _STOP_SIGNALS}
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
    todo = "\n".join([*evidence, *_last_checkpoint(folder), f"its output is in {folder / LOGS}"])
    fault = RunError(what, todo, cause=cause)
    fault.worker, fault.hosts = found.worker if found.is_own else None, tuple(lost or ())
    return fault


def _last_checkpoint(folder: Path) -> list[str]:
    """How to go on, where something was saved."""
    from stagewright.runtime.resuming import checkpoints_in, is_of_run, run_of

    names = [path.name for path in checkpoints_in(folder) if is_of_run(path, run_of(folder))]
    return [f"last checkpoint: {names[0]}, go on with --resume auto --out {folder}"] if names else []
