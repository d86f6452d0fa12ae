"""Starting a run's workers, here or in other hosts, and starting them again: one loop for all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from stagewright.errors import RunError
from stagewright.plan import Plan
from stagewright.record import Record
from stagewright.runtime.launch.environment import RESTARTED, SCHEDULE, this_command, worker_environment
from stagewright.runtime.launch.local import Hosts, launch
from stagewright.runtime.launch.mps import shared_cards
from stagewright.runtime.launch.ssh import OverSsh, launch_over_ssh
from stagewright.runtime.run_folder import RECORD
from stagewright.runtime.safety.flight import SCHEDULE_FILE
from stagewright.runtime.settings import Settings
from stagewright.schedule import Schedule
from stagewright.scheduling import make_schedule
from stagewright.training.display import Display
from stagewright.training.events import Teller
from stagewright.training.gathering import COMMAND, typed_command
from stagewright.training.job import Job
from stagewright.training.replan import describe_change, plan_without, plan_without_hosts

_SAME_FAULT = 3
"""So many times in a row at the same place a fault is the program's, and no restart will help."""


@dataclass
class Starter:
    """What starts the workers of a plan and waits for them."""

    settings: Settings
    command: Sequence[str] | None
    """A worker's command line; this process's own by default."""
    hosts: Hosts | OverSsh | None
    share: int

    def start(self, plan: Plan, folder: Path, environment: Mapping[str, str]) -> None:
        """Runs the workers until all have ended well; raises with the first cause where one has not."""
        limit_s, cards = self.settings.timeout_s, _workers_a_card(plan, self.settings, self.share)
        command = self.command or this_command()
        with shared_cards(1 if is_remote(self.hosts) else cards, self.settings.transport) as shared:
            own = {**environment, **shared}
            if isinstance(self.hosts, OverSsh):
                launch_over_ssh(self.hosts, command[1:], plan, folder, own, limit_s)
            else:
                launch(command, plan, folder, own, hosts=self.hosts, timeout_s=limit_s)


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
    environment, restarts, causes = dict[str, str](), 0, list[str]()
    while True:
        try:
            return _run_launcher(schedule, folder, starter, environment)
        except RunError as fault:
            causes.append(fault.cause)
            _refuse_the_same(fault, causes)
            after = _plan_after(schedule.plan, fault) if job.replan else None
            if restarts < job.max_restarts and not fault.hosts:
                restarts += 1
                tell(folder, "restart", f"{fault.cause}; starting again ({restarts} of {job.max_restarts})")
            elif after is not None:
                tell(folder, "replan", f"{fault.cause}; {describe_change(schedule.plan, after)}")
                if isinstance(starter.hosts, OverSsh):
                    starter.hosts = starter.hosts.without(fault.hosts)
                schedule, restarts = make_schedule(after, agree=schedule.agree), 0
                environment[SCHEDULE] = str(folder / SCHEDULE_FILE)
                watching.rename(_title_of(after))
            else:
                raise
            environment[RESTARTED] = "1"


def _refuse_the_same(fault: RunError, causes: Sequence[str]) -> None:
    """Ends a run that fails time and again in the same way at the same batch."""
    # Whether a worker's exit status was seen before the others were ended is a matter of moments.
    last = [re.sub(r" with exit status \d+", "", cause) for cause in causes[-_SAME_FAULT:]]
    if len(last) == _SAME_FAULT and len(set(last)) == 1 and " of batch " in last[0]:
        raise RunError(
            f"{fault.cause}, {_SAME_FAULT} times in a row",
            f"this is a fault of the program or its data, not of a device\n{fault.todo or ''}".rstrip(),
        ) from fault


def _plan_after(plan: Plan, fault: RunError) -> Plan | None:
    """The plan without what is lost; None where nothing is known to be, or nothing would be left."""
    if fault.hosts:
        left = {id.host for id in plan.devices} - set(fault.hosts)
        return plan_without_hosts(plan, fault.hosts) if left else None
    if fault.worker is None or len(plan.devices) < 2:
        return None
    return plan_without(plan, {plan.devices[fault.worker]})


def _title_of(plan: Plan) -> str:
    """What a person sees of a run at first."""
    return f"{plan.model} on {plan.placement}"


def _run_launcher(schedule: Schedule, folder: Path, starter: Starter, extra: Mapping[str, str]) -> None:
    """Starts the workers of one plan and waits for them."""
    schedule.save(folder / SCHEDULE_FILE)
    settings = starter.settings
    environment = worker_environment(schedule.plan, folder, threads=settings.threads, device=settings.device)
    starter.start(schedule.plan, folder, {**environment, COMMAND: typed_command(), **extra})


def tell(folder: Path, kind: str, text: str) -> None:
    """Adds a sentence to the events of a run."""
    words = Teller(folder)
    words.tell(kind, text=text)
    words.close()


def _workers_a_card(plan: Plan, settings: Settings, share: int = 1) -> int:
    """How many workers share a card, at least as many as it is to be shared by; 1 on the CPU."""
    if settings.device == "cpu":
        return 1
    return max(share, -(-len(plan.devices) // max(1, torch.cuda.device_count())))
