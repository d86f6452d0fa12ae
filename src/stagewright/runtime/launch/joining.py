"""How a worker comes to its run: to the folder that its launcher holds, or that the first worker takes for all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stagewright.errors import StagewrightError, UsageError
from stagewright.runtime.launch.environment import RUN_FOLDER
from stagewright.runtime.launch.meeting import Place
from stagewright.runtime.run_folder import RunFolder, read_identity
from stagewright.runtime.world import World, gather_json

Take = Callable[[bool], AbstractContextManager[RunFolder]]
"""(whether the run was here before): holds the run's folder."""


@contextmanager
def joined(world: World, take: Take) -> Iterator[RunFolder]:
    """This worker's run; all workers must ask, and all see the same folder or none may begin."""
    # A host that was replaced counts its restarts from 0: the others know better.
    again = any(place.was_restarted for place in world.places or [Place.here()])
    run, own = None, dict[str, Any]()
    with ExitStack() as stack:
        if world.worker == 0:
            try:
                run = _launched() or stack.enter_context(take(again))
                again = again or run.is_restarted
                own = {"folder": str(run.path), "id": run.id, "changes": run.changes, "again": again}
            except StagewrightError as fault:
                own = {"fault": fault.what, "todo": fault.todo}
        told = gather_json(own, world.control, world.size)[0]
        if "fault" in told:
            raise UsageError(told["fault"], told["todo"])
        run = run or RunFolder(Path(told["folder"]), told["id"], changes=tuple(told["changes"]))
        sees = (read_identity(run.path) or {}).get("id") == run.id
        seen = gather_json([sees, socket.gethostname()], world.control, world.size)
        lost = [f"worker {worker} on {host}" for worker, (sees, host) in enumerate(seen) if not sees]
        if lost:  # each host would save its parts for itself alone
            raise UsageError(
                f"{lost[0]} does not see the run's folder {run.path} as worker 0 on {seen[0][1]} does",
                "name one with --out that all hosts share",
            )
        run.is_restarted = told["again"]
        yield run


def _launched() -> RunFolder | None:
    """The run of the launcher that started this worker and holds the folder."""
    if RUN_FOLDER not in os.environ:
        return None
    path = Path(os.environ[RUN_FOLDER])
    known = read_identity(path) or {}
    return RunFolder(path, known.get("id", ""), changes=tuple(known.get("changes", [])))
