"""The stem: a process that has loaded torch, and of which a run's workers are forked.

    launcher  ── {"worker": 2, "command": …, "out": …} ─────────▶  stem ── fork ──▶ worker 2
              ◀─ {"worker": 2, "process": 4711} ────────────────
              ◀─ {"worker": 2, "process": 4711, "status": -9} ──  when it has ended

Loading torch takes a core some seconds, a fork none: workers share one load, and those that are started again need not
wait for it. The stem does nothing else, so that it has one thread and no device when it forks.

Whoever runs many launchers forks these of a stem too. Each is then given a stem of its own, forked of it before it
does anything else, and nothing is loaded twice:

    harness ──▶ stem ── fork ──▶ launcher ── fork ──▶ its stem ── fork ──▶ worker 0, worker 1, …

This file runs as a script and stands on nothing but Python: the package itself is loaded by name, where it can be.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_ALWAYS = ("torch", "torch._dynamo", "stagewright.runtime.checkpoint")
"""What every worker loads sooner or later, though the launcher may not; optimizers load torch._dynamo."""
_WITHOUT_CARDS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Whoever asks for cards while the stem loads must not open one: what opens a card cannot be forked."""
_NOT_OPENED = 3
"""CUDA_ERROR_NOT_INITIALIZED"""
_FORK = "STAGEWRIGHT_FORK"
"""With `no` in this variable every worker loads torch for itself, for scripts whose libraries cannot be forked."""
_LONGEST = 1 << 20
"""Bytes of a message, at most; an order names only what its environment has other than the stem's."""


# As the launcher sees it


class _Child:
    """A process that this one forked, with what is needed of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """Ends it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its status, once it has ended."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


spare: tuple[_Child, socket.socket, dict[str, str]] | None = None
"""The stem that this process was given when it was forked, and its environment, until it is used."""


class Stem:
    """A stem that is started when it is first needed, and again when it is gone.

    It loads `names`, or what this process has loaded; with `gives_stems`, what it forks has a stem of its own.
    """

    def __init__(self, names: Sequence[str] | None = None, *, gives_stems: bool = False) -> None:
        self._names, self._gives_stems = names, gives_stems
        self._process: subprocess.Popen[bytes] | _Child | None = None
        self._channel: socket.socket | None = None
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Stem:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    @property
    def process(self) -> int | None:
        """The process id, while there is one."""
        return self._process.pid if self._process is not None else None

    def fork(
        self, worker: int, command: Sequence[str], environment: Mapping[str, str], out: Path, errors: Path
    ) -> None:
        """Asks for a worker that runs a command, its output in two files; `hear` tells what became of it."""
        channel = self._channel or self._start(command, environment, errors)
        keys = {*environment, *self._environment}
        changes = {key: environment.get(key) for key in keys if environment.get(key) != self._environment.get(key)}
        order = {
            "worker": worker, "command": list(command), "environment": changes, "folder": os.getcwd(),
            "out": str(out), "errors": str(errors), "gives_stem": self._gives_stems,
        }  # fmt: skip
        with suppress(BrokenPipeError, ConnectionError):  # a stem that is gone is noticed when it is listened to
            channel.send(json.dumps(order).encode())

    def hear(self, patience_s: float = 0.0) -> Iterator[dict[str, int]]:
        """What the stem has said since the last time, waiting a while for something; raises StemGoneError when gone."""
        if self._channel is not None and patience_s > 0:
            select.select([self._channel], [], [], patience_s)
        while self._channel is not None:
            try:
                said = self._channel.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                said = b""
            if not said:
                raise StemGoneError(self.close())
            yield json.loads(said)

    def close(self) -> int | None:
        """Ends the stem, and with it every worker that is left; returns its status, which it may have had before."""
        status = None
        if self._process is not None and self._channel is not None:
            self._process.kill()
            status = self._process.wait()
            self._channel.close()
        self._process = self._channel = None
        return status

    def _start(self, command: Sequence[str], environment: Mapping[str, str], errors: Path) -> socket.socket:
        global spare
        if spare is not None and environment.get(_FORK) != "no":
            (self._process, self._channel, self._environment), spare = spare, None
            return self._channel
        self._environment = {**environment, **_WITHOUT_CARDS}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, errors.open("ab") as log:
            # -P: what stands beside this file must not be taken for modules of Python. The command is there to be seen.
            start = [sys.executable, "-P", __file__, str(os.getpid()), str(theirs.fileno()), *command]
            self._process = subprocess.Popen(
                start, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        names = _to_load() if self._names is None else self._names
        self._channel.send(json.dumps({"names": list(names), "path": sys.path}).encode())
        return self._channel


class StemGoneError(EOFError):
    """A stem that has ended by itself, or was killed."""

    def __init__(self, status: int | None) -> None:
        how = f"with signal {-status}" if status is not None and status < 0 else f"with exit status {status}"
        super().__init__(f"the process that workers are forked of ended {how}")


def _to_load() -> list[str]:
    """The modules that workers will need: those of the package that this process has loaded, and torch's."""
    own = sorted(name for name in sys.modules if name.split(".")[0] == "stagewright" and "__main__" not in name)
    return [*_ALWAYS, *own]


# As the stem itself


def main() -> None:
    """Serves until the launcher is gone; in a fork, goes on as a worker."""
    parent, number = sys.argv[1:3]
    follow_parent(int(parent))
    _be_called("stem")
    channel, forks = socket.socket(fileno=int(number)), os.environ.get(_FORK) != "no"
    wanted = channel.recv(_LONGEST)
    if forks and wanted:
        _load(**json.loads(wanted))
        forks = not _has_opened_a_card()
    order = _serve(channel)
    if order is not None:
        _become(order)
        if forks and order["gives_stem"]:
            order = _give_stem() or order
        _run_command(order["command"], anew=not forks)


def _load(names: Sequence[str], path: list[str]) -> None:
    """Loads modules that workers will need, from where the launcher has them."""
    before, sys.path[:] = list(sys.path), path
    for name in names:
        with suppress(ImportError):  # workers will say what is missing, if they miss it
            importlib.import_module(name)
    sys.path[:] = before
    gc.collect()
    gc.freeze()  # objects that stay are not touched again, and their memory stays shared


def _has_opened_a_card() -> bool:
    """Whether something that was loaded opened CUDA's driver, which forks could not use then; asking opens nothing."""
    with suppress(OSError, AttributeError):
        count = ctypes.c_int()
        return int(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))) != _NOT_OPENED
    return False


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Forks workers and tells of their ends until the launcher is gone; comes back in each fork with its order."""
    ears, mouth = socket.socketpair()
    mouth.setblocking(False)
    signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    workers: dict[int, int] = {}
    while True:
        ready = select.select([channel, ears], [], [])[0]
        if ears in ready:
            ears.recv(4096)
            _tell_ends(channel, workers)
        if channel in ready:
            order = channel.recv(_LONGEST)
            if not order:
                return None
            stem, process = os.getpid(), os.fork()
            if process == 0:
                follow_parent(stem)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (channel, ears, mouth):
                    each.close()
                return json.loads(order)  # type: ignore[no-any-return]
            workers[process] = json.loads(order)["worker"]
            _say(channel, worker=workers[process], process=process)


def _give_stem() -> dict[str, Any] | None:
    """Forks a stem for this process to use; comes back in each of that one's workers too, there with its order."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher, process = os.getpid(), os.fork()
    if process:
        theirs.close()
        here: Any = importlib.import_module("stagewright.runtime.stem")  # this file, as the package knows it
        here.spare = (_Child(process), ours, dict(os.environ))
        return None
    ours.close()
    os.setsid()
    follow_parent(launcher)
    _be_called("stem")
    order = _serve(theirs)
    if order is None:
        os._exit(0)
    _become(order)
    return order


def _tell_ends(channel: socket.socket, workers: dict[int, int]) -> None:
    """Tells of every worker that has ended."""
    while workers:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        _say(channel, worker=workers.pop(process), process=process, status=os.waitstatus_to_exitcode(status))


def _say(channel: socket.socket, **what: int) -> None:
    """Tells the launcher, which may be gone."""
    with suppress(OSError):
        channel.send(json.dumps(what).encode())


# As a worker


def _become(order: Mapping[str, Any]) -> None:
    """Makes a fork what a process would be that was started for this order alone."""
    os.setsid()
    _be_called(f"worker-{order['worker']}")
    os.chdir(order["folder"])
    for key, value in order["environment"].items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    for number, path in ((1, order["out"]), (2, order["errors"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    if "numpy" in sys.modules:  # Python's own numbers begin anew by themselves, torch's always begin alike
        sys.modules["numpy"].random.seed()


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


def state_of(process: int) -> str:
    """A process's state as Linux writes it: R runs, S sleeps, T is stopped; empty when it is gone."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


if __name__ == "__main__":
    main()
