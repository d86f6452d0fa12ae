"""How a worker comes to its run: to the folder that its launcher holds, or that the first worker takes for all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.errors import StagewrightError, UsageError
from stagewright.runtime.launch.environment import RUN_FOLDER
from stagewright.runtime.launch.meeting import own_place
from stagewright.runtime.run_folder import RunFolder, read_identity
from stagewright.runtime.world import World, gather_json

Take = Callable[[bool], AbstractContextManager[RunFolder]]
"""(whether the run was here before): holds the run's folder."""


@dataclass(frozen=True)
class Joined:
    """The run that a worker belongs to."""

    folder: Path
    id: str
    is_restarted: bool
    """Whether workers of this run ran before, of this process's launcher or of any other's."""
    changes: tuple[str, ...]
    """What is not as it was when the run last stopped."""
    held: RunFolder | None = None
    """The folder, where this worker holds it for all."""


@contextmanager
def joined(world: World, take: Take) -> Iterator[Joined]:
    """This worker's run; all workers must ask, and all see the same folder or none may begin."""
    # A host that was replaced counts its restarts from 0: the others know better.
    again = any(place.was_restarted for place in world.places or [own_place()])
    with ExitStack() as stack:
        launched = os.environ.get(RUN_FOLDER)
        own, held = dict[str, Any](), None
        if world.worker == 0 and launched is not None:
            known = read_identity(Path(launched)) or {}
            own = {"folder": launched, "id": known.get("id", ""), "changes": known.get("changes", [])}
        elif world.worker == 0:
            try:
                held = stack.enter_context(take(again))
                own = {"folder": str(held.path), "id": held.id, "changes": list(held.changes)}
            except StagewrightError as fault:
                own = {"fault": fault.what, "todo": fault.todo}
        told = gather_json(own, world.control, world.size)[0]
        if "fault" in told:
            raise UsageError(told["fault"], told["todo"])
        _check_shared(world, Path(told["folder"]), told["id"])
        yield Joined(Path(told["folder"]), told["id"], again, tuple(told["changes"]), held)


def _check_shared(world: World, folder: Path, id: str) -> None:
    """Refuses hosts that do not see the run's folder: each would save its parts for itself alone."""
    sees = (read_identity(folder) or {}).get("id") == id
    told = gather_json([sees, socket.gethostname()], world.control, world.size)
    lost = [f"worker {worker} on {host}" for worker, (sees, host) in enumerate(told) if not sees]
    if lost:
        raise UsageError(
            f"{lost[0]} does not see the run's folder {folder} as worker 0 on {told[0][1]} does",
            "name one with --out that all hosts share",
        )
