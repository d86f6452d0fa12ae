"""The agent: what starts the workers of this host, watches them, and ends all when one has failed.

Workers are forked of a stem. They meet in a store that lies in memory of this process, which no other user can open.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stagewright.errors import RunError
from stagewright.runtime.run_folder import PRIVATE
from stagewright.runtime.stem import Stem, StemGoneError, state_of

STORE = "STAGEWRIGHT_STORE"
"""The variable that names the file in which the workers of one host meet."""
_LOOK_EVERY_S = 0.05
_STOPPED_GRACE = 1.5
"""So many timeouts a worker may be stopped (SIGSTOP). Those who wait for it end sooner, and know at which action."""
_STOPPED = ("T", "t")
_LEAVE_S = 10
"""How long workers may take to end when they are asked to."""
_Look = Callable[[Iterable[int]], None]
"""Is given the workers' processes about once a second."""


def run_agent(
    stem: Stem, command: Sequence[str], num_workers: int, logs: Path, environment: Mapping[str, str], timeout_s: float,
    look: _Look = lambda processes: None,
) -> dict[int, int]:  # fmt: skip
    """Runs workers until all have ended well, or one has not; returns the exit status of those that failed."""
    logs.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    store = os.memfd_create("stagewright-store")
    own = {**os.environ, **environment, STORE: f"/proc/{os.getpid()}/fd/{store}"}
    agent = _Agent(stem, num_workers, timeout_s, look)
    try:
        for worker in range(num_workers):
            log = logs / f"worker-{worker}.log"
            stem.fork(worker, command, {**own, **_variables_of(worker, num_workers)}, log, log)
        return agent.wait()
    finally:
        agent.end()
        os.close(store)


class _Agent:
    """Watches workers that a stem was asked for, and ends them."""

    def __init__(self, stem: Stem, num_workers: int, timeout_s: float, look: _Look) -> None:
        self._stem, self._num_workers, self._timeout_s, self._look = stem, num_workers, timeout_s, look
        self._processes: dict[int, int] = {}
        """For each worker that is there its process."""
        self._statuses: dict[int, int] = {}
        """For each worker that has ended how it did; below 0 by a signal."""
        self._stopped_since: dict[int, float] = {}
        self._looked_at = 0.0

    def wait(self) -> dict[int, int]:
        """The exit status of the workers that failed, once one has; nothing when all have ended well.

        One that is stopped then is among them: it cannot have been the others' victim.
        """
        while len(self._statuses) < self._num_workers:
            time.sleep(_LOOK_EVERY_S)
            self._listen()
            failed = {worker: status for worker, status in self._statuses.items() if status != 0}
            late = self._stopped_too_long()
            if failed or late:
                stopped = [worker for worker, process in self._alive().items() if state_of(process) in _STOPPED]
                return {**dict.fromkeys(stopped, -signal.SIGSTOP), **failed}
        return {worker: status for worker, status in self._statuses.items() if status != 0}

    def _alive(self) -> dict[int, int]:
        return {worker: process for worker, process in self._processes.items() if worker not in self._statuses}

    def _listen(self) -> None:
        """Hears which workers are there and which have ended."""
        try:
            for said in self._stem.hear():
                worker, process = said["worker"], said["process"]
                if "status" not in said:
                    self._processes[worker] = process
                elif self._processes.get(worker) == process:  # else it is one of those that ran before
                    self._statuses[worker] = said["status"]
        except StemGoneError as fault:
            self._processes.clear()  # they went with it
            raise RunError(str(fault), "look for who ends processes, and whether the memory was full") from None

    def _stopped_too_long(self) -> bool:
        """Whether a worker has been stopped for longer than anyone may be waited for; a stem that has been is ended."""
        now = time.monotonic()
        if now - self._looked_at < min(1.0, self._timeout_s / 20):
            return False
        self._looked_at, stem, alive = now, self._stem.process, self._alive()
        self._look(alive.values())
        watched = [*alive.values(), *([stem] if stem is not None else [])]
        since = {each: self._stopped_since.get(each, now) for each in watched if state_of(each) == "T"}
        self._stopped_since = since
        late = {each for each, start in since.items() if now - start > self._timeout_s * _STOPPED_GRACE}
        if stem in late:
            os.kill(int(stem or 0), signal.SIGKILL)
        return any(process in late for process in alive.values())

    def end(self) -> None:
        """Ends the workers that are left: asks first, but for those that are stopped and hear nothing."""
        self._send(lambda process: signal.SIGKILL if state_of(process) in _STOPPED else signal.SIGTERM)
        stem = self._stem.process
        is_deaf = stem is not None and state_of(stem) in _STOPPED
        if not is_deaf and not self._all_end(_LEAVE_S):
            self._send(lambda process: signal.SIGKILL)
            is_deaf = not self._all_end(_LEAVE_S)
        if is_deaf or len(self._processes) < self._num_workers:
            # It tells nothing, or has not come to all orders yet, and must not when others follow.
            self._stem.close()

    def _send(self, number: Callable[[int], signal.Signals]) -> None:
        for process in self._alive().values():
            _send(process, number(process))

    def _all_end(self, timeout_s: float) -> bool:
        """Whether all workers that were there have ended in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(RunError):
                self._listen()
            if self._processes.keys() <= self._statuses.keys():
                return True
            time.sleep(0.005)
        return False


def _send(process: int, number: signal.Signals) -> None:
    """Sends a signal to a worker and all it has started; one just forked may not lead a group yet."""
    try:
        os.killpg(process, number)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _variables_of(worker: int, num_workers: int) -> dict[str, str]:
    """What a worker finds in its environment, as torchrun would put it."""
    size = str(num_workers)
    return {
        "RANK": str(worker), "LOCAL_RANK": str(worker), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }  # fmt: skip
