"""Who takes part in a measured comparison: the planner's choices, the plans that a case names, peers and the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from stagewright.bench.baselines import has_deepspeed
from stagewright.bench.contest import ALONE, PASSES
from stagewright.bench.memory import free_memory, in_groups
from stagewright.bench.rehearsal_cases import RehearsalCase
from stagewright.bench.rounds import Told
from stagewright.bench.speed import middle_pass
from stagewright.bench.verdict import DDP
from stagewright.cluster import Cluster, DeviceId
from stagewright.cost import Costs
from stagewright.errors import UsageError
from stagewright.plan import Plan
from stagewright.planning.fixed import fixed_plan
from stagewright.planning.options import PlanOptions
from stagewright.planning.ratio import cut_by_ratio, table_of
from stagewright.planning.reasons import shape
from stagewright.planning.search import Search, make_plan
from stagewright.profile import Profile
from stagewright.record import Record
from stagewright.rehearsal.measuring import busy_together, profiled_hosts
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate

FAR_BEHIND = 1.2
"""On hosts data parallelism is no contender of ours where it is predicted to take so many times as long, or longer, or
is the planner's choice: DDP is one anyway, and it would take long."""
OTHERS = 3
"""So many plans at least beside the planner's exact choice; its runners-up where a case names none but its choices."""


def candidates(
    case: RehearsalCase, profile: Profile, cluster: Cluster
) -> tuple[dict[str, Plan], tuple[str, ...], dict[str, float]]:
    """The plans by name, which of them are the planner's own, the exact one and the stale one, and all plans' steps."""
    costs = Costs(profile, cluster)

    def score(plan: Plan) -> Record:
        return simulate(make_schedule(plan), profile, cluster, detail=False, costs=costs)

    found: dict[str, Plan] = {}
    searches = [
        make_plan(profile, cluster, PlanOptions(batch=case.batch, staleness=staleness), score)
        for staleness in ("0", "ssp")
    ]
    chosen = [add(found, next(those_that_run(search, cluster))) for search in searches]
    for wanted in case.plans:
        add(found, fixed_plan(profile, wanted.options(case.batch), cluster))
    # After those that are small, which are in memory with the planner's choice then.
    whole, best = fixed_plan(profile, PlanOptions(batch=case.batch), cluster), found[chosen[0]]
    is_rival = len(best.stages) > 1 and score(whole).median_step_s < FAR_BEHIND * score(best).median_step_s
    if case.slices is not None or is_rival:
        add(found, whole)
    for plan in those_that_run(searches[0], cluster):
        if len(found) <= OTHERS:
            add(found, plan)
    return found, tuple(chosen), {name: score(plan).median_step_s for name, plan in found.items()}


def those_that_run(search: Search, cluster: Cluster) -> Iterator[Plan]:
    """The planner's choice and its rivals, the best first; without those that a contest cannot run, if it can any."""
    plans = [rival.plan for rival in (search.best, *search.others)]
    any_runs = False
    for plan in plans:
        with suppress(UsageError):
            yield on_first_hosts(plan, cluster)
            any_runs = True
    if not any_runs:
        yield on_first_hosts(plans[0], cluster)


def on_first_hosts(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with its idle hosts last: worker n of a contest runs on host n."""
    moved = {id: DeviceId(number, 0) for number, id in enumerate(plan.devices)}
    stages = tuple(replace(stage, devices=tuple(moved[id] for id in stage.devices)) for stage in plan.stages)
    shares = [host.cpu_share for host in cluster.hosts]
    if any(shares[old.host] != shares[new.host] for old, new in moved.items()):
        raise UsageError(
            f"the planner leaves hosts idle that differ from the others ({plan.placement}), which a contest cannot",
            "give the host at the end of the cluster file the place of the idle one",
        )
    return replace(plan, stages=stages)


def add(found: dict[str, Plan], plan: Plan) -> str:
    """The name under which a plan is in the table; plans that are the same are there once."""
    plan = replace(plan, notes=())
    for name, other in found.items():
        if other == plan:
            return name
    name = title(plan)
    name = name if name not in found else f"{name} ({plan.placement})"
    found[name] = plan
    return name


def title(plan: Plan) -> str:
    """`3-1 cut at fc1, 2 × 1f1b, 4 buckets`."""
    parts = [shape(plan)]
    if len(plan.stages) > 1:
        parts.append(f"{plan.num_microbatches} × {plan.policy}" if plan.num_microbatches > 1 else "1 microbatch")
    if plan.route == "rotate":
        parts.append("rotate")
    if max(stage.num_buckets for stage in plan.stages) > 1:
        parts.append("buckets " + "/".join(str(stage.num_buckets) for stage in plan.stages))
    if not plan.is_synchronous:
        parts.append("versions " + ",".join(map(str, plan.versions)))
    return ", ".join(parts)


def limit(case: RehearsalCase) -> dict[str, str]:
    """What nobody can beat: one process with all cores, or each slice of a card alone with its rows."""
    return {"kind": "alone" if case.slices is None else "each alone", "name": ALONE}


def passes(case: RehearsalCase, profile: Profile) -> list[dict[str, Any]]:
    """Passes over the model as the profile has them, beside everyone's turns; a card's speed is its own."""
    if case.device == "cuda":
        return []
    cluster = case.hosts()
    rows, expected_s = middle_pass(profile)
    return [
        {"kind": "passes", "name": PASSES, "rows": rows, "expected_s": expected_s, "busy": busy_together(cluster),
         "counted": profiled_hosts(cluster)}
    ]  # fmt: skip


def groups(case: RehearsalCase, told: Sequence[Told], profile: Profile) -> list[list[Told]]:
    """Who is in memory at once; a card has not the memory for two."""
    if case.slices is not None:
        return [[each] for each in told]
    return list(in_groups(told, profile, len(case.hosts().hosts), free_memory()))


def peers(case: RehearsalCase, profile: Profile, cluster: Cluster) -> list[dict[str, Any]]:
    """The peers, pipelines cut where their stages take the same time; of each family the fastest stays.

    torch's pipelining sends by NCCL on cards, which hangs between workers that share one.
    """
    hosts = len(cluster.hosts)
    found: list[dict[str, Any]] = [{"kind": "ddp", "name": DDP}]
    if case.slices is not None:
        return found
    for stages in sorted({hosts, 2}):
        if stages < len(profile.layers) and hosts % stages == 0:
            found += pipelines("pipelining", "torch pipelining 1F1B", case, profile, stages, hosts // stages)
    if has_deepspeed() and hosts < len(profile.layers):
        # Its engine keeps the topology in globals of a module: one a process.
        found += pipelines("deepspeed", "DeepSpeed pipeline", case, profile, hosts, 1)[-1:]
    return found


def pipelines(
    kind: str, called: str, case: RehearsalCase, profile: Profile, stages: int, replicas: int
) -> list[dict[str, Any]]:
    """One family: a peer's pipeline of so many stages and replicas, with a few numbers of microbatches."""
    family = f"{called}, {stages} stages" + (f" × {replicas}" if replicas > 1 else "")
    cuts = list(cut_by_ratio(table_of(profile).costs("time")[:-1], [1.0] * stages))
    return [
        {"kind": kind, "name": f"{family}, {microbatches} microbatches", "family": family, "cuts": cuts,
         "microbatches": microbatches}
        for microbatches in (stages, 2 * stages)
        if case.batch // replicas % microbatches == 0
    ]  # fmt: skip
