"""A command as a process of its own, forked of Python's fork server, which has torch loaded.

    launcher ──▶ fork server: loads torch once ── fork ──▶ worker 0, worker 1, …

Loading torch takes a core three seconds and a fork none: a run of four workers that is started again is back after
1.2 s instead of 7.4 s. Forks end with the fork server, and that with the process that started it, however that ends.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from stagewright.errors import RunError

_FORK = "STAGEWRIGHT_FORK"
"""With `no` in this variable every process loads torch for itself, for scripts whose libraries cannot be forked."""
LOADED = "STAGEWRIGHT_LOADED"
"""The variable that names to the fork server the modules that it loads."""
_ALWAYS = (
    "torch", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch._meta_registrations",
    "stagewright.runtime.checkpoint",
)  # fmt: skip
"""What every worker loads sooner or later, though the launcher may not; optimizers load torch._dynamo."""
_UNKNOWN = 255
"""The exit status that Python gives processes whose fork server has gone."""
_Enter = Callable[[], None]


def start_process(
    name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, enter: _Enter | None = None
) -> BaseProcess:
    """Starts `python script …` or `python -m module …` in this folder, its output added to a log.

    The process calls `enter` before anything else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stagewright.runtime.preload"])
    process = context.Process(target=_run, name=name, args=(name, list(command), dict(environment), log, enter))
    with _environment_of_server(environment):
        forkserver.ensure_running()
    with _without_main():
        try:
            process.start()
        except (EOFError, ConnectionError):
            raise _server_gone() from None
    return process


@contextmanager
def _environment_of_server(environment: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, this process has the environment in which the fork server starts.

    It is that of the workers, for libraries read variables such as OMP_NUM_THREADS when they are loaded, and modules
    are found where this process finds them.
    """
    own = {name for name in sys.modules if name.split(".")[0] == "stagewright" and "__main__" not in name}
    loaded = () if environment.get(_FORK) == "no" else (*_ALWAYS, *sorted(own))
    before = dict(os.environ)
    _set_environment({
        **environment, LOADED: " ".join(loaded), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONSAFEPATH": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whoever asks for cards must not open one: it could not be forked then
    })  # fmt: skip
    os.environ.pop("RANK", None)  # whoever looks for workers by it must not take the server for one
    try:
        yield
    finally:
        _set_environment(before)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hides this process's script meanwhile from Python, which would run it in every fork beside the command."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def server_pid() -> int | None:
    """The fork server's process id, once it was started."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined, no-any-return]


def check_server(processes: Sequence[BaseProcess]) -> None:
    """Raises where processes have ended because the fork server did."""
    if any(process.exitcode == _UNKNOWN for process in processes) and _has_server_ended():
        raise _server_gone()


def _has_server_ended() -> bool:
    """Whether the fork server has ended, or does within a moment: its pipes close a little before."""
    for _ in range(100):
        if _server_end() is not None:
            return True
        time.sleep(0.01)
    return False


def _server_end() -> os.waitid_result | None:
    """How the fork server has ended; left for Python to see too, which starts another one then."""
    pid = server_pid()
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) if pid is not None else None
    return None


def _server_gone() -> RunError:
    _has_server_ended()
    end = _server_end()
    how = "" if end is None else f" with {'exit status' if end.si_code == os.CLD_EXITED else 'signal'} {end.si_status}"
    what = f"the process that workers are forked of ended{how}"
    return RunError(what, "look for who ends processes, and whether the memory was full")


def _run(name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, enter: _Enter | None) -> None:
    """Makes a fork what a process would be that was started for this command alone, and runs it."""
    # A fork server that the user's own script has started before has not loaded it.
    preload: Any = sys.modules.get("stagewright.runtime.preload")
    follow_parent(preload.SERVER if preload else None)
    os.setsid()
    _be_called(name)
    _set_environment(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    if enter is not None:
        enter()
    _begin_anew()
    try:
        _run_command(command, anew=not preload or not preload.CAN_FORK or environment.get(_FORK) == "no")
    finally:
        atexit._run_exitfuncs()


def _begin_anew() -> None:
    """Gives libraries that the fork server has loaded this process's own state, as if it had loaded them."""
    loaded: dict[str, Any] = sys.modules
    if "numpy" in loaded:  # Python's own numbers begin anew by themselves, torch's always begin alike
        loaded["numpy"].random.seed()
    if "torch" in loaded and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        loaded["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _run_command(command: Sequence[str], *, anew: bool) -> None:
    """Runs `python -m module …` or `python script …` in this very process, anything else or `anew` in its place."""
    what = command[1] if len(command) > 1 and command[0] == sys.executable else "-"
    if anew or (what.startswith("-") and what != "-m"):
        os.execvp(command[0], list(command))
    # As Python would have it: scripts find what stands beside them, modules what stands in this folder.
    sys.path.insert(0, os.getcwd() if what == "-m" else str(Path(what).resolve().parent))
    if what == "-m":
        sys.argv = list(command[2:])
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command[1:])
        runpy.run_path(what, run_name="__main__")


def follow_parent(parent: int | None = None) -> None:
    """Asks Linux to end this process when the one that started it goes, and ends it when that one is not `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def _be_called(name: str) -> None:
    """Gives this process a name that others see: of forks, Linux shows neither their command nor their variables."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, name.encode())


def is_stopped(process: int) -> bool:
    """Whether a process is stopped (SIGSTOP), or a debugger holds it."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
