"""Starting workers: here under torch's elastic agent, or as one of those that torchrun or SLURM started.

this process          RANK is set     SLURM_PROCID is set     neither
is                    a worker        a worker                the one that starts workers of its own
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from stagewright.errors import RunError
from stagewright.plan import Plan
from stagewright.profiling.heap import KEPT_LONGER
from stagewright.runtime.diagnosis import blame, name_of
from stagewright.runtime.flight import SCHEDULE_FILE, STOP_FILE
from stagewright.runtime.settings import Settings
from stagewright.runtime.stem import Stem
from stagewright.schedule import Schedule

RUN_FOLDER = "STAGEWRIGHT_RUN_FOLDER"
"""The variable that tells workers where the run keeps its files."""
RESTARTED = "STAGEWRIGHT_RESTARTED"
"""The variable that tells workers that others ran before them in the same run."""
SCHEDULE = "STAGEWRIGHT_SCHEDULE"
"""The variable that names a file whose schedule workers use instead of their own."""


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


def launch(
    command: Sequence[str], plan: Plan, folder: Path, environment: Mapping[str, str], *, stem: Stem | None = None,
    timeout_s: float = Settings().timeout_s,
) -> None:  # fmt: skip
    """Starts a worker for each device of the plan on this host and waits for all; raises with the first cause.

    Each worker's output ends up in logs/worker-3.log and the like in the folder. With a `stem` that is kept, workers
    that are started again need not load torch again.
    """
    from stagewright.runtime.agent import run_agent

    clear_words(folder)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the cause is told once, below
    kept = nullcontext(stem) if stem is not None else Stem()
    try:
        with kept as stem:
            codes = run_agent(stem, command, len(plan.devices), folder / "logs", environment, timeout_s)
    finally:
        collect_output(folder / "logs")
    if codes:
        raise explain(plan, folder, codes)


def collect_output(logs: Path) -> None:
    """Writes what each worker said as worker-3.log, its name before every line: stdout, then stderr, run by run."""
    for old in logs.glob("worker-*.log"):
        old.unlink()
    said = sorted(logs.glob("*/attempt_*/*/std*.log"), key=lambda path: (path.parts[-4:-2], path.name != "stdout.log"))
    for path in said:
        worker = path.parent.name
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        with (logs / f"worker-{worker}.log").open("a", encoding="utf-8") as log:
            log.writelines(f"worker {worker} │ {line}\n" for line in lines)


def clear_words(folder: Path) -> None:
    """Removes what an earlier run in the same folder said about its end."""
    for path in (*folder.glob("worker-*.error.json"), *folder.glob("worker-*.flight")):
        path.unlink(missing_ok=True)


@contextmanager
def stop_on_signals(folder: Path) -> Iterator[None]:
    """While the block runs, SIGTERM and SIGUSR1 leave the word for the workers to save and stop.

    The word stays until the block ends: workers that are just being started again find it too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        (folder / STOP_FILE).touch()

    (folder / STOP_FILE).unlink(missing_ok=True)
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        (folder / STOP_FILE).unlink(missing_ok=True)


def explain(plan: Plan, folder: Path, exit_codes: Mapping[int, int]) -> RunError:
    """The first cause in words: which worker, where it stood, what it said, and who waited for it."""
    path = folder / SCHEDULE_FILE
    schedule = Schedule.load(path) if path.exists() else Schedule(plan=plan, orders=((),) * len(plan.devices))
    found = blame(schedule, folder, exit_codes)
    who = f"{name_of(schedule.plan, found.worker)} " if found.worker is not None else ""
    todo = "\n".join([*found.evidence, *last_checkpoint(folder), f"its output is in {folder / 'logs'}"])
    fault = RunError(f"{who}{found.why}", todo)
    fault.worker = found.worker
    return fault


def last_checkpoint(folder: Path) -> list[str]:
    """How to go on, where something was saved."""
    names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    return [f"last checkpoint: {names[-1]}, go on with --resume auto --out {folder}"] if names else []
