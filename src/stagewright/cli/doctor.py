"""`stagewright doctor`: what ended a run, and who is to blame."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stagewright.errors import UsageError


def doctor(
    folder: Annotated[Path, typer.Argument(help="the folder of a run (--out)")],
    as_json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> None:
    """Reads the flight recorders of a run that hung or failed: where each worker stood, and who kept whom waiting.

    Example: stagewright doctor results/vgg16
    """
    from stagewright.runtime.confession import read_confessions
    from stagewright.runtime.diagnosis import blame, name_of, position, where_all_stand
    from stagewright.schedule import Schedule

    path = folder / "schedule.json"
    if not path.exists():
        raise UsageError(f"{folder} is no folder of a run: it has no schedule.json", "give the folder named by --out")
    schedule = Schedule.load(path)
    plan = schedule.plan
    stands, verdict = where_all_stand(folder, len(plan.devices)), blame(schedule, folder)
    told = read_confessions(folder, len(plan.devices))
    who = name_of(plan, verdict.worker) if verdict.worker is not None else None
    if as_json:
        places = {worker: position(stand.action) for worker, stand in stands.items()}
        Console().print_json(
            data={"culprit": verdict.worker, "why": verdict.why, "evidence": verdict.evidence, "workers": places}
        )
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("worker", "device", "stands at", "last sign", "said"):
        table.add_column(title, no_wrap=title != "said")
    newest = max((stand.time_s for stand in stands.values()), default=0.0)
    for worker, device in enumerate(plan.devices):
        stand = stands.get(worker)
        place = position(stand.action) if stand else "no trace"
        ago = f"−{newest - stand.time_s:.1f} s" if stand else ""
        said = told[worker].what.splitlines()[0] if worker in told else ""
        table.add_row(str(worker), str(device), place, ago, escape(said))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(f"\nculprit: {who} {verdict.why}" if who else f"\n{verdict.why}", markup=False)
    for line in verdict.evidence:
        console.print(f"  {line}", markup=False)
