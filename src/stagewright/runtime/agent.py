"""The agent: what starts the workers of this host, watches them, and ends all when one has failed.

It is torch's elastic agent but for how workers are started: they are forked of a stem.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from stagewright.errors import RunError
from stagewright.runtime.meeting import LOOPBACK, Loopback
from stagewright.runtime.stem import Stem, StemGoneError, state_of

LOOK_EVERY_S = 0.05
STOPPED_GRACE = 1.5
"""So many timeouts a worker may be stopped (SIGSTOP). Those who wait for it end sooner, and know at which action."""
STOPPED = ("T", "t")
LEAVE_S = 10
"""How long workers may take to end when they are asked to."""


def run_agent(
    stem: Stem, command: Sequence[str], num_workers: int, logs: Path, environment: Mapping[str, str], timeout_s: float
) -> dict[int, int]:
    """Runs workers until all have ended well, or one has not; returns the exit status of those that failed."""
    name = uuid.uuid4().hex
    spec = WorkerSpec(
        role="worker", local_world_size=num_workers, rdzv_handler=Loopback(name), entrypoint=command[0],
        args=tuple(command), max_restarts=0, monitor_interval=LOOK_EVERY_S, local_addr=LOOPBACK,
    )  # fmt: skip
    agent = Agent(spec, stem, logs / name, environment, timeout_s)
    return {worker: failure.exitcode for worker, failure in agent.run().failures.items()}


class Agent(SimpleElasticAgent):
    """Starts and ends workers by a stem; what is not here is torch's."""

    def __init__(
        self, spec: WorkerSpec, stem: Stem, logs: Path, environment: Mapping[str, str], timeout_s: float
    ) -> None:
        super().__init__(spec)
        self._stem, self._logs, self._timeout_s = stem, logs, timeout_s
        self._environment = {**os.environ, **environment}
        self._processes: dict[int, int] = {}
        """For each worker that is there its process."""
        self._statuses: dict[int, int] = {}
        """For each worker that has ended how it did; below 0 by a signal."""
        self._stopped_since: dict[int, float] = {}
        self._looked_at = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker in worker_group.workers:
            folder = self._logs / "attempt_0" / str(worker.global_rank)
            folder.mkdir(parents=True)
            own, command = {**self._environment, **variables_of(worker, worker_group)}, worker_group.spec.args
            self._stem.fork(worker.global_rank, command, own, folder / "stdout.log", folder / "stderr.log")
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._listen()
        failed = {worker: status for worker, status in self._statuses.items() if status != 0}
        failed.update(dict.fromkeys(self._stopped_too_long(), -signal.SIGSTOP))
        if failed:
            found = {worker: self._failure(worker, status) for worker, status in failed.items()}
            return RunResult(state=WorkerState.FAILED, failures=found)
        if len(self._statuses) == len(worker_group.workers):
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._statuses))
        return RunResult(state=WorkerState.HEALTHY)

    def _failure(self, worker: int, status: int) -> ProcessFailure:
        return ProcessFailure(worker, self._processes[worker], status, error_file="")

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

    def _stopped_too_long(self) -> list[int]:
        """Workers that have been stopped for longer than anyone may be waited for; a stem that has been is ended."""
        now = time.monotonic()
        if now - self._looked_at < min(1.0, self._timeout_s / 20):
            return []
        self._looked_at, stem = now, self._stem.process
        alive = {worker: process for worker, process in self._processes.items() if worker not in self._statuses}
        watched = [*alive.values(), *([stem] if stem is not None else [])]
        since = {each: self._stopped_since.get(each, now) for each in watched if state_of(each) == "T"}
        self._stopped_since = since
        late = {each for each, start in since.items() if now - start > self._timeout_s * STOPPED_GRACE}
        if stem in late:
            os.kill(int(stem or 0), signal.SIGKILL)
        return [worker for worker, process in alive.items() if process in late]

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = LEAVE_S) -> None:
        """Ends the workers that are left: asks first, but for those that are stopped and hear nothing."""
        timeout = min(timeout, LEAVE_S)  # torch's own is longer, and not all of its versions give it
        self._send(lambda process: signal.SIGKILL if state_of(process) in STOPPED else death_sig)
        stem = self._stem.process
        is_deaf = stem is not None and state_of(stem) in STOPPED
        if not is_deaf and not self._all_end(timeout):
            self._send(lambda process: signal.SIGKILL)
            is_deaf = not self._all_end(timeout)
        if is_deaf or len(self._processes) < len(self._worker_group.workers):
            # It tells nothing, or has not come to all orders yet, and must not when others follow.
            self._stem.close()

    def _send(self, number: Callable[[int], signal.Signals]) -> None:
        for worker, process in self._processes.items():
            if worker not in self._statuses:
                send(process, number(process))

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


def send(process: int, number: signal.Signals) -> None:
    """Sends a signal to a worker and all it has started; one just forked may not lead a group yet."""
    try:
        os.killpg(process, number)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def variables_of(worker: Worker, group: WorkerGroup) -> dict[str, str]:
    """What torch expects in a worker's environment."""
    size = str(worker.world_size)
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
