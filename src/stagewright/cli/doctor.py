"""`stagewright doctor`: what ended a run, and who is to blame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stagewright.cli.options import takes
from stagewright.cli.show import show, table
from stagewright.errors import UsageError, visible

_ENDS = {"finished": "it finished", "stopped": "it was stopped, and can go on with --resume auto"}
"""What is said of runs that ended well, and for which nobody is to blame."""
_HEALTH = ("replicas", "slow", "copy")
"""Events of a run that tell of devices which are not sound; of several copies the last one says how it is."""


@dataclass(frozen=True, kw_only=True)
class _Shown:
    json: bool = False
    """print what was found as JSON"""


@takes()
def doctor(folder: Annotated[Path, typer.Argument(help="the folder of a run (--out)")], *, own: _Shown) -> None:
    """Reads the flight recorders of a run that hung or failed: where each worker stood, and who kept whom waiting.

    Example: stagewright doctor results/vgg16
    """
    from stagewright.runtime.run_folder import is_held, read_identity
    from stagewright.runtime.safety.diagnosis import Blame, Scene
    from stagewright.schedule import Schedule
    from stagewright.training.events import read_events

    path = folder / "schedule.json"
    if not path.exists():
        raise UsageError(f"{folder} is no folder of a run: it has no schedule.json", "give the folder named by --out")
    scene, state = Scene.read(Schedule.load(path), folder), str((read_identity(folder) or {}).get("state"))
    end = "it is under way" if state == "running" and is_held(folder) else _ENDS.get(state)
    found = Blame(None, end) if end is not None else scene.blame()
    told = [event for _, event in read_events(folder) if event.get("event") in _HEALTH]
    copies = [event for event in told if event["event"] == "copy"]
    health = [f"{event['event']}: {event.get('text')}" for event in told if event not in copies[:-1]]
    if own.json:
        places = {worker: scene.place_of(worker) for worker in scene.stands}
        data = {"culprit": found.worker, "why": found.why, "evidence": found.evidence, "health": health}
        Console().print_json(data={**data, "workers": places})
        return
    newest, rows = max((time_s for time_s, _ in scene.stands.values()), default=0.0), []
    for worker, device in enumerate(scene.schedule.plan.devices):
        ago = f"−{newest - scene.stands[worker][0]:.1f} s" if worker in scene.stands else ""
        said = visible(scene.told[worker].what.splitlines()[0]) if worker in scene.told else ""
        rows.append((str(worker), str(device), scene.place_of(worker) or "no trace", ago, Text(said)))
    workers = table("worker! | device! | stands at! | last sign! | said", rows)
    who = f"culprit: {scene.name_of(found.worker)} " if found.worker is not None else ""
    words = [*(f"  {line}" for line in found.evidence), *health]
    show(workers, [f"{who}{visible(found.why)}", *map(visible, words)])
