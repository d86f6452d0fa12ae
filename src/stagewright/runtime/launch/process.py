"""A command as a process of its own, forked of Python's fork server, which has torch loaded.

    launcher ──▶ fork server: loads torch once ── fork ──▶ worker 0, worker 1, …

Loading torch takes a core three seconds and a fork none: a run of four workers that is started again is back after
1.2 s instead of 7.4 s. Forks end with the fork server, and that with the process that started it, however that ends.
The fork server imports this file before it forks anything; what its end does is done there, and nowhere else.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
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
_LOADED = "STAGEWRIGHT_LOADED"
"""The variable that names to the fork server the modules that it loads."""
_SERVER = os.getpid() if _LOADED in os.environ else None
"""The fork server, where this was loaded there: one that the user's own script has started before has not loaded it."""
_Enter = Callable[[], None]


def start_process(
    name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, enter: _Enter | None = None
) -> BaseProcess:
    """Starts `python script …` or `python -m module …` in this folder, its output added to a log.

    The process calls `enter` before anything else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_run, name=name, args=(name, list(command), dict(environment), log, enter))
    with _as_fork_server(environment, loads=command[0] == sys.executable and environment.get(_FORK) != "no"):
        forkserver.ensure_running()
        try:
            process.start()
        except (EOFError, ConnectionError):
            raise _server_gone(_end_of_server()) from None
    return process


@contextmanager
def _as_fork_server(environment: Mapping[str, str], *, loads: bool) -> Iterator[None]:
    """While the block runs, this process has the environment in which the fork server starts, and no script.

    It is that of the workers, for libraries read variables such as OMP_NUM_THREADS when they are loaded, and modules
    are found where this process finds them. Its script Python would run in every fork, beside the command.
    """
    own = {name for name in sys.modules if name.split(".")[0] == "stagewright" and "__main__" not in name}
    # What every worker loads sooner or later, though the launcher may not; optimizers load torch._dynamo.
    late = "torch torch._dynamo torch.fx.experimental.symbolic_shapes torch._meta_registrations"
    loaded = [late, "stagewright.runtime.checkpoint.saving", *sorted(own)] if loads else []
    before, main = dict(os.environ), sys.modules["__main__"]
    _set_environment({
        **environment, _LOADED: " ".join(loaded), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONSAFEPATH": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whoever asks for cards must not open one: it could not be forked then
    })  # fmt: skip
    os.environ.pop("RANK", None)  # whoever looks for workers by it must not take the server for one
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        _set_environment(before)


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def server_pid() -> int | None:
    """The fork server's process id, once it was started."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined, no-any-return]


def check_server(processes: Sequence[BaseProcess]) -> None:
    """Raises where processes have ended because the fork server did: their exit status is then Python's 255."""
    if any(process.exitcode == 255 for process in processes) and (how := _end_of_server()) is not None:
        raise _server_gone(how)


def _end_of_server() -> str | None:
    """How the fork server ended, if it does within a second: its pipes close a little before.

    Its end is left for Python to see too, which starts another one then.
    """
    pid, until = server_pid(), time.monotonic() + 1.0
    while pid is not None and time.monotonic() < until:
        with suppress(ChildProcessError):
            if (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                return f" with {'exit status' if end.si_code == os.CLD_EXITED else 'signal'} {end.si_status}"
        time.sleep(0.01)
    return None


def _server_gone(how: str | None) -> RunError:
    what = f"the process that workers are forked of ended{how or ''}"
    return RunError(what, "look for who ends processes, and whether the memory was full")


def _run(name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, enter: _Enter | None) -> None:
    """Makes a fork what a process would be that was started for this command alone, and runs it."""
    follow_parent(_SERVER)
    os.setsid()
    if sys.platform == "linux":  # of forks, Linux shows neither their command nor their variables
        ctypes.CDLL(None).prctl(15, name.encode())
    _set_environment(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if enter is not None:
        enter()
    loaded: dict[str, Any] = sys.modules
    if "numpy" in loaded:  # Python's own numbers begin anew by themselves, torch's always begin alike
        loaded["numpy"].random.seed()
    if "torch" in loaded and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        loaded["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        _run_command(command, anew=not _CAN_FORK or environment.get(_FORK) == "no")
    finally:
        atexit._run_exitfuncs()


def _run_command(command: Sequence[str], *, anew: bool) -> None:
    """Runs `python -m module …` or `python script …` in this very process, anything else or `anew` in its place."""
    what = command[1] if len(command) > 1 and command[0] == sys.executable else "-"
    if anew or (what.startswith("-") and what != "-m"):
        os.execvp(command[0], list(command))
    # As Python would have it: scripts find what stands beside them, modules what stands in this folder.
    sys.path.insert(0, os.getcwd() if what == "-m" else str(Path(what).resolve().parent))
    sys.argv = list(command[2:] if what == "-m" else command[1:])
    if what == "-m":
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(what, run_name="__main__")


def follow_parent(parent: int | None = None) -> None:
    """Asks Linux to end this process when the one that started it goes, and ends it when that one is not `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def is_stopped(process: int) -> bool:
    """Whether a process is stopped (SIGSTOP), or a debugger holds it."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _has_opened_a_card() -> bool:
    """Whether something that was loaded opened CUDA's driver, which forks could not use then; asking opens nothing."""
    with suppress(OSError, AttributeError):
        count = ctypes.c_int()
        status = int(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)))
        return status != 3  # CUDA_ERROR_NOT_INITIALIZED
    return False


if _SERVER is not None:
    os.setsid()  # a signal to the launcher's group is for the launcher
    follow_parent()
    for _name in os.environ[_LOADED].split():
        with suppress(ImportError):  # workers will say what is missing, if they miss it
            importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # objects that stay are not touched again, and their memory stays shared
_CAN_FORK = _SERVER is not None and not _has_opened_a_card()
