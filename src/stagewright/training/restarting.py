"""Starting a run's workers, here or in other hosts, and starting them again: one loop for all."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from stagewright.cluster import DeviceId, format_placement
from stagewright.errors import PlanError, RunError
from stagewright.plan import Plan, Stage
from stagewright.record import Record
from stagewright.runtime.launch.environment import RESTARTED, this_command
from stagewright.runtime.launch.local import Hosts, launch
from stagewright.runtime.launch.ssh import OverSsh
from stagewright.runtime.run_folder import RECORD, SCHEDULE_FILE
from stagewright.runtime.settings import Settings
from stagewright.schedule import Schedule
from stagewright.scheduling import make_schedule
from stagewright.training.events import Display, Teller
from stagewright.training.gathering import COMMAND, typed_command
from stagewright.training.job import Job


@dataclass
class Starter:
    """With what the workers of a plan are started."""

    settings: Settings
    command: Sequence[str] | None
    """A worker's command line; this process's own by default."""
    hosts: Hosts | OverSsh | None
    share: int


def is_remote(hosts: Hosts | OverSsh | None) -> bool:
    """Whether workers run on other machines than this one."""
    return isinstance(hosts, OverSsh)


def start_workers(schedule: Schedule, job: Job, folder: Path, console: Console, starter: Starter) -> Record:
    """Starts the workers, shows what they tell, and returns the record they leave.

    A run that fails is started again as often as the job allows. With `replan` it goes on without the hosts that are
    lost, or without the device that failed it, for as long as one is left.
    """
    with Display(folder, console, num_steps=job.steps, title=_title_of(schedule.plan)) as watching:
        _run_and_restart(schedule, job, folder, watching, starter)
    return Record.load(folder / RECORD)


def _run_and_restart(schedule: Schedule, job: Job, folder: Path, watching: Display, starter: Starter) -> None:
    """Starts the workers, time and again where the job allows it, until they end well."""
    environment, restarts, causes = {COMMAND: typed_command()}, 0, list[str]()
    while True:
        try:
            schedule.save(folder / SCHEDULE_FILE)
            return launch(
                starter.command or this_command(), schedule.plan, folder, starter.settings, hosts=starter.hosts,
                share=starter.share, extra=environment,
            )  # fmt: skip
        except RunError as fault:
            causes.append(fault.cause)
            _refuse_the_same(fault, causes)
            after = _plan_after(schedule.plan, fault) if job.replan else None
            if restarts < job.max_restarts and not fault.hosts:
                restarts += 1
                tell(folder, "restart", f"{fault.cause}; starting again ({restarts} of {job.max_restarts})")
            elif after is not None:
                tell(folder, "replan", f"{fault.cause}; {_describe_change(schedule.plan, after)}")
                if isinstance(starter.hosts, OverSsh):
                    starter.hosts = starter.hosts.without(fault.hosts)
                schedule, restarts = make_schedule(after, agree=schedule.agree), 0
                watching.rename(_title_of(after))
            else:
                raise
            environment[RESTARTED] = "1"


def _refuse_the_same(fault: RunError, causes: Sequence[str]) -> None:
    """Ends a run that fails three times in a row in the same way at the same batch: no restart will help."""
    times = 3
    # Whether a worker's exit status was seen before the others were ended is a matter of moments.
    last = [re.sub(r" with exit status \d+", "", cause) for cause in causes[-times:]]
    if len(last) == times and len(set(last)) == 1 and " of batch " in last[0]:
        raise RunError(
            f"{fault.cause}, {times} times in a row",
            f"this is a fault of the program or its data, not of a device\n{fault.todo or ''}".rstrip(),
        ) from fault


def _plan_after(plan: Plan, fault: RunError) -> Plan | None:
    """The plan without what is lost; None where nothing is known to be, or nothing would be left."""
    if fault.hosts:
        left = {id.host for id in plan.devices} - set(fault.hosts)
        return _plan_without_hosts(plan, fault.hosts) if left else None
    if fault.worker is None or len(plan.devices) < 2:
        return None
    return _plan_without(plan, {plan.devices[fault.worker]})


def _title_of(plan: Plan) -> str:
    """What a person sees of a run at first."""
    return f"{plan.model} on {plan.placement}"


def tell(folder: Path, kind: str, text: str) -> None:
    """Adds a sentence to the events of a run."""
    words = Teller(folder)
    words.tell(kind, text=text)
    words.close()


def _plan_without(plan: Plan, lost: Collection[DeviceId]) -> Plan:
    """The plan with the same layers a stage, on the devices that are left.

    A stage that has lost all of its devices gets one of the stage that has most of them; where there are fewer devices
    than stages, the stages at the end become one.

        7-1 without 0:3    →  6-1        7-1 without 0:7    →  6-1        1-1 without either    →  1
    """
    left = [tuple(id for id in stage.devices if id not in lost) for stage in plan.stages]
    alive = {id for devices in left for id in devices}
    if not alive:
        raise PlanError(f"all devices of {plan.placement} are lost", "start again when some are back")
    stages = list(plan.stages)
    while len(stages) > len(alive):
        stages[-2:] = [_merged(stages[-2], stages[-1])]
        left[-2:] = [tuple(dict.fromkeys((*left[-2], *left[-1])))]
    for number in range(len(stages)):
        if not left[number]:
            _take_one(left, number)
    made = tuple(replace(stage, devices=devices, row_weights=None) for stage, devices in zip(stages, left))
    return replace(plan, stages=made, notes=(f"made when {format_placement([tuple(sorted(lost))])} was lost",))


def _plan_without_hosts(plan: Plan, lost: Collection[int]) -> Plan:
    """The plan without all devices of some hosts; the others move up in number."""
    after = _plan_without(plan, {id for id in plan.devices if id.host in lost})
    hosts = sorted({id.host for id in plan.devices} - set(lost))
    number = {host: place for place, host in enumerate(hosts)}
    return replace(
        after,
        stages=tuple(
            replace(stage, devices=tuple(DeviceId(number[id.host], id.device) for id in stage.devices))
            for stage in after.stages
        ),
    )


def _merged(one: Stage, other: Stage) -> Stage:
    """Two neighbouring stages as one, with as many versions as the first."""
    return replace(one, layers=(*one.layers, *other.layers), recompute=one.recompute or other.recompute)


def _take_one(left: list[tuple[DeviceId, ...]], stage: int) -> None:
    """Gives a stage the last device of the stage that has most."""
    richest = max(range(len(left)), key=lambda number: len(left[number]))
    *kept, given = left[richest]
    left[stage] = (given,)
    if kept:
        left[richest] = tuple(kept)


def _describe_change(before: Plan, after: Plan) -> str:
    """What is different, in a line."""
    return (
        f"going on as {_shape(after.replicas)} instead of {_shape(before.replicas)}: "
        f"{after.placement} instead of {before.placement}"
    )


def _shape(replicas: Sequence[int]) -> str:
    """Replicas of the stages in short: 7-1."""
    return "-".join(map(str, replicas))
