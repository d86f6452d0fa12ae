"""Starting workers: here with torch's elastic launcher, or as one of those that torchrun or SLURM started.

this process          RANK is set     SLURM_PROCID is set     neither
is                    a worker        a worker                the one that starts workers of its own
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from stagewright.cluster import count
from stagewright.errors import RunError
from stagewright.plan import Plan
from stagewright.runtime.flight import read_flight

RUN_FOLDER = "STAGEWRIGHT_RUN_FOLDER"
"""The variable that tells workers where the run keeps its files."""
PORT = 29_400
"""Where the workers of several hosts meet."""
LEAVE_S = 10.0
"""How long hosts' commands may take to end when they are asked to."""


def is_worker() -> bool:
    """Whether a launcher started this process as a worker; SLURM's variables are turned into torch's."""
    if "RANK" in os.environ:
        return True
    if "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        os.environ.update(from_slurm(os.environ))
        return True
    return False


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torch's variables out of SLURM's: the first host of the job is where the workers meet."""
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
    job = int(environment.get("SLURM_JOB_ID", "0") or 0)
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(hosts)),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + job % 20_000)),
    }


def first_host(hosts: str) -> str:
    """The first of `gpu[03-05,9],other` as SLURM writes hosts: gpu03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", hosts)
    return "localhost" if match is None else match[1] + (match[2] or "")


def die_with_parent() -> None:
    """Asks Linux to end this process when the one that started it is gone."""
    follow_parent()
    if sys.platform == "linux" and os.getppid() == 1:
        os._exit(1)


def follow_parent() -> None:
    """Asks Linux to end this process when the one that starts it goes, which is still there."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def new_run_folder(name: str, parent: str | Path | None = None) -> Path:
    """A new folder for a run's files."""
    if parent is None:
        return Path(tempfile.mkdtemp(prefix=f"stagewright-{name}-"))
    folder = Path(parent)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def this_command() -> list[str]:
    """The command that started this process, to start workers with."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        name = spec.name.removesuffix(".__main__")
        return [sys.executable, "-m", name, *sys.argv[1:]]
    if not getattr(main, "__file__", None):
        raise RunError(
            "workers run the script again, but this Python session has none",
            "put the training into a script, or start the workers with torchrun",
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
    }
    if device == "cuda":
        made.setdefault("NCCL_MAX_NCHANNELS", "2")
    return {key: os.environ.get(key, value) for key, value in made.items()}


def launch(
    command: Sequence[str], plan: Plan, folder: Path, environment: Mapping[str, str], max_restarts: int = 0
) -> None:
    """Starts a worker for each device of the plan on this host and waits for all; raises with the first cause.

    Each worker's output goes to logs/…/stdout.log and stderr.log in the folder.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(plan.devices),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        elastic_launch(config, entrypoint=command[0])(*command[1:])
    except ChildFailedError as failure:
        worker, first = failure.get_first_failure()
        raise explain(plan, folder, worker, first.exitcode, first.error_file_data) from None
    finally:
        restore(before)


def restore(before: Mapping[str, str | None]) -> None:
    """Puts environment variables back."""
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def explain(plan: Plan, folder: Path, worker: int, exit_code: int, details: Mapping[str, object] | None) -> RunError:
    """The first cause in words: which worker, where it stood, and what it said."""
    stages = [number for number, members in enumerate(plan.workers) if worker in members]
    stood = read_flight(folder, worker)
    where = f" at {stood[-1][1]._replace(batch=0)} of batch {stood[-1][1].batch}" if stood else ""
    if exit_code < 0:
        how = f"stopped with signal {-exit_code}"
    else:
        how = f"failed with exit status {exit_code}"
    said = first_words(folder, worker)
    todo = (f"{said}\n" if said else "") + f"its output is in {folder / 'logs'}"
    stage = ", ".join(map(str, stages))
    return RunError(f"worker {worker} (stage {stage}, device {plan.devices[worker]}) {how}{where}", todo)


def first_words(folder: Path, worker: int) -> str | None:
    """What a worker wrote down about its end."""
    try:
        told = json.loads((folder / f"worker-{worker}.error.json").read_text(encoding="utf-8"))
        return str(told["what"]) + (f"\n{told['todo']}" if told.get("todo") else "")
    except (OSError, ValueError, KeyError):
        return None


class HostError(RunError):
    """A host whose command failed."""

    def __init__(self, host: int, status: int, what: str, todo: str | None = None) -> None:
        super().__init__(what, todo)
        self.host, self.status = host, status


class Hosts(Protocol):
    """Several hosts, real or emulated: where they are, and how a command is run in one of them."""

    @property
    def addresses(self) -> Sequence[str]:
        """For each host the address at which the others find it."""

    @property
    def launcher(self) -> Sequence[str]:
        """torchrun, as it is called there."""

    def workers(self, plan: Plan) -> Sequence[int]:
        """For each host how many of the plan's workers run there."""

    def reach(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs another one in a host."""

    def environment(self) -> Mapping[str, str]:
        """What this process must pass on to what it starts there."""


@dataclass(frozen=True)
class OverSsh:
    """Hosts that are reached over ssh, with the same working folder as here."""

    addresses: tuple[str, ...]
    launcher: tuple[str, ...] = ("torchrun",)

    def workers(self, plan: Plan) -> tuple[int, ...]:
        return plan.host_workers(len(self.addresses))

    def reach(self, host: int, command: Sequence[str]) -> list[str]:
        there = f"cd {shlex.quote(os.getcwd())} && {shlex.join(command)}"
        return ["ssh", "-o", "BatchMode=yes", self.addresses[host], there]

    def environment(self) -> dict[str, str]:
        return {}


def host_commands(command: Sequence[str], hosts: Hosts, workers: Sequence[int], port: int) -> list[list[str]]:
    """For each host in use the command that starts its workers under torchrun, meeting at the first of them."""
    used = [(host, local) for host, local in enumerate(workers) if local]
    meeting = hosts.addresses[used[0][0]]
    made = []
    for number, (host, local) in enumerate(used):
        run = [
            *hosts.launcher, f"--nnodes={len(used)}", f"--node-rank={number}", f"--nproc-per-node={local}",
            f"--master-addr={meeting}", f"--master-port={port}", *command,
        ]  # fmt: skip
        made.append(hosts.reach(host, run))
    return made


def launch_hosts(commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """Runs one command for each host side by side; when one fails, all are ended and the first cause is shown."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (logs / f"host-{number}.log").open("wb") as log:
                running.append(start_host(command, log, environment or {}))
        wait_for_all(running, logs)
    finally:
        end_all(running)


def launch_in(hosts: Hosts, command: Sequence[str], plan: Plan, folder: Path, environment: Mapping[str, str]) -> None:
    """Starts the plan's workers in hosts that see this machine's files; raises with the first cause."""
    commands = host_commands(command, hosts, hosts.workers(plan), PORT)
    try:
        launch_hosts(commands, folder, {**environment, **hosts.environment()})
    except HostError as failure:
        raise explain(plan, folder, failure.host, failure.status, None) from None


def start_host(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts one host's command; it ends with this process, however that ends."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment},
        preexec_fn=follow_parent,
    )  # fmt: skip


def end_all(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the processes that still run: kindly first, so that they can end their own."""
    for process in running:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + LEAVE_S
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_all(running: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    """Returns when every process ended well; raises at the first that did not."""
    left = dict(enumerate(running))
    while left:
        for number, process in list(left.items()):
            try:
                status = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            if status != 0:
                tail = (logs / f"host-{number}.log").read_text(errors="replace").strip().splitlines()[-3:]
                raise HostError(
                    number,
                    status,
                    f"{count(1, 'host')} of {len(running)} failed: host {number} ended with status {status}",
                    "\n".join(tail) or f"its output is in {logs}",
                )
            del left[number]
