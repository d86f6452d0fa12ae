"""`stagewright plan`: the best split for a profile on a cluster, its rivals, and the reasons."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.options import Hardware, names_file, takes
from stagewright.cli.show import show, table
from stagewright.cluster import Cluster, count, format_devices
from stagewright.errors import UsageError
from stagewright.memory import in_words
from stagewright.plan import Plan
from stagewright.planning.money import Objective, choose, with_one_more
from stagewright.planning.options import PlanOptions
from stagewright.planning.search import Choice, Search, make_plan, shape
from stagewright.profile import Profile
from stagewright.profiling.drawing import describe_devices
from stagewright.report.figures import GAP, alike, amount, rate_unit, seconds, size
from stagewright.runtime.corrections import price_of_staleness
from stagewright.schema import dump_json, schema
from stagewright.simulation import simulator
from stagewright.system import OWN


@schema(error=UsageError)
class _Planning(Hardware):
    objective: Objective = "time"
    """what the best plan has least of; the devices that a plan uses cost their price_per_h"""
    max_cost: float | None = None
    """with time-under-cost: what a million samples may cost"""
    one_more: bool = False
    """tell what one more device of each kind would bring"""
    simulate: bool = True
    """simulate the best of what the estimate ranks; else rank by the estimate alone"""
    json: bool = False
    """print the plans as JSON"""
    out: Path | None = None
    """save the best plan here"""


@takes()
def plan(
    what: Annotated[str, typer.Argument(metavar="PROFILE|MODEL", help="a profile file, or a model's name")],
    *, plan: PlanOptions, own: _Planning,
) -> None:  # fmt: skip
    """Find the fastest plan that fits; options of the plan fix what is searched otherwise.

    Example: stagewright plan vgg16.profile.json --cluster titan-v-8 --batch 224 -o plan.json
    """
    hardware = own.load_cluster()
    profile = own.load_profile(what if names_file(what) else None, hardware) or _analytic(what, hardware, plan, own)
    ways, profile = _ways(profile, own), own.with_optimizer(profile)
    system = own.load_system()

    def planned(cluster: Cluster) -> tuple[Search, Sequence[Search]]:
        score = simulator(profile, cluster, system) if own.simulate else None
        search = partial(make_plan, profile, cluster, plan, score, system, ways)
        return choose(search, cluster, own.objective, own.max_cost)

    if own.one_more and plan.placement:
        raise UsageError("--one-more is for devices that may be chosen", "leave --placement out")
    found, curve = planned(hardware)
    more = {kind: planned(with_one_more(hardware, kind))[0].best for kind in hardware.kinds if own.one_more}
    if notes := own.assumed(profile, found.best.plan):
        best = replace(found.best.plan, notes=(*found.best.plan.notes, *notes))
        found = replace(found, best=replace(found.best, plan=best))
    if own.out is not None:
        found.best.plan.save(own.out)
    if own.json:
        also = {"curve": [_as_plain(each.best) for each in curve], "one_more": {k: _as_plain(more[k]) for k in more}}
        typer.echo(dump_json(_summary(found) | also), nl=False)
    else:
        on = [
            (best.cost, seconds(best.step_s), shape(best.plan), best.plan.placement) for best in (c.best for c in curve)
        ]
        priced = (f"{cost:.3g} a million samples, {step} a step: {cut} on {where}" for cost, step, cut, where in on)
        grown = (_one_more(kind, best, found.best) for kind, best in more.items())
        _show(found, profile, hardware, [*priced, *grown, *_next(found.best.plan, what, own)])


def _one_more(kind: str, best: Choice, now: Choice) -> str:
    """What one more device of a kind would bring."""
    cost = "" if best.cost is None else f", {best.cost:.3g} a million samples"
    faster = f"{now.step_s / best.step_s:.2f} × as fast, {seconds(best.step_s)} a step{cost}"
    return f"with one more {kind}: {faster}: {shape(best.plan)} on {best.plan.placement}"


def _analytic(model: str, cluster: Cluster, options: PlanOptions, own: _Planning) -> Profile:
    """A profile of the cluster's first kind of device, from shapes alone."""
    from stagewright.profiling.analytic import profile_for

    devices = len(cluster.device_ids)
    batch = options.rows(devices)
    share = max(batch // devices, 2)
    sizes = tuple(sorted({max(share // 4, 2), share, max(batch // 2, 2), max(batch, 2)}))
    return profile_for(cluster, model, sizes, own.precision, own.adapters)


def _ways(profile: Profile, own: _Planning) -> dict[str, Profile]:
    """By option the profile that takes less memory; adapters are left out of theirs, which is little."""
    others = (name for name in ("sgd", "adafactor") if name != own.optimizer)
    ways = {f"--optimizer {name}": own.with_optimizer(profile, name) for name in others}
    return ways | ({} if own.lora is not None else {"--lora 16": own.with_optimizer(profile.frozen())})


def _show(found: Search, profile: Profile, cluster: Cluster, after: Sequence[str]) -> None:
    """The plans as a table, the best one first, and why it is; what is faster by too little is told below it."""
    best = found.best.plan
    devices = " · ".join(dict.fromkeys(describe_devices(host.devices) for host in cluster.hosts))
    hosts = "one host" if len(cluster.hosts) == 1 else f"{len(cluster.hosts)} hosts"
    title = f"{best.model}, {best.batch} {profile.sample_name} a step, {devices} ({hosts})"
    how = f"weighed {found.num_plans:,} plans, simulated {found.num_simulated:,}, in {found.seconds:.1f} s"
    lines = list[tuple[str, ...]]()
    for choice, label in _rows(found):
        ends = dict.fromkeys((0, len(choice.peak_bytes) - 1))
        memory, mark = " / ".join(size(choice.peak_bytes[end]) for end in ends), "  " if lines else "▸ "
        lines.append((mark + label, seconds(choice.step_s), amount(choice.images_per_s, profile), memory, choice.limit))
    if found.data_parallel is None:
        lines.append(("  data parallel", GAP, GAP, GAP, found.why_no_data_parallel))
    plans = table(f"  plan! | step> | {rate_unit(profile)}> | memory first / last! | limited by", lines)
    price = price_of_staleness(best.versions)
    groups = [] if found.best.record is None else alike(found.best.record, cluster)
    kinds = [] if found.best.cost is None else [f"a million samples cost {found.best.cost:.3g}"]
    kinds += [f"memory of {format_devices(ids)}: {in_words(use.peak_parts)}" for ids, use in groups if use.peak_parts]
    told = [
        *best.notes[:1], _settings(best), *kinds, *_passed_over(found), *best.notes[1:], *([price] if price else []),
    ]  # fmt: skip
    show(f"{title}    {how}", plans, [*told, *after])


def _next(plan: Plan, what: str, own: _Planning) -> list[str]:
    """Where the plan lies, and the commands that go on with it on the same hardware; nothing where it was not saved."""
    if own.out is None:
        return []
    words = ["--profile", what] if names_file(what) else []
    words += ["--assume-kind", own.assume_kind] if own.assume_kind is not None else []
    words += ["--cluster", own.cluster] if own.cluster is not None else []
    words += ["--system", own.system] if own.system != OWN.name else []
    typed = ["--optimizer", own.optimizer] if own.optimizer != type(own)().optimizer else []
    typed += ["--lora", str(own.lora)] if own.lora is not None else []
    typed += ["--lora-targets", ",".join(own.lora_targets)] if own.lora_targets else []
    where = "" if own.cluster is None else f"on {own.cluster} itself: "
    simulate = shlex.join(["stagewright", "simulate", str(own.out), *words, *typed])
    train = shlex.join(["stagewright", "train", plan.model, "--plan", str(own.out), *typed])
    return [f"saved {own.out}", f"next: {simulate}", f"{where or 'or: '}{train}"]


def _rows(found: Search) -> list[tuple[Choice, str]]:
    """The plans of the table, the best first, each with a name of its own; faster ones are told below it.

    A plan with more stages must be faster by more than a little to be the best; a row with such a step would belie it.
    """
    others = [choice for choice in found.others if choice.step_s >= found.best.step_s]
    plain = found.data_parallel
    chosen = [found.best, *others, *([] if plain is None else [plain])]
    named: dict[str, Choice] = {}
    for choice, label in zip(chosen, _tell_apart([choice.plan for choice in chosen])):
        named.setdefault(label, choice)
    return [(choice, label) for label, choice in named.items()]


def _tell_apart(plans: Sequence[Plan]) -> list[str]:
    """Each plan's shape, and of plans of one shape what differs: `7-1 cut at fc1, 4 microbatches`."""
    labels = []
    for plan in plans:
        own, alike = _traits(plan), [_traits(other) for other in plans if shape(other) == shape(plan)]
        differing = (text for key, text in own.items() if any(each[key] != text for each in alike))
        labels.append(", ".join([shape(plan), *differing]))
    return labels


def _traits(plan: Plan) -> dict[str, str]:
    """What plans of one shape may differ in, in words."""
    again = [str(number) for number, stage in enumerate(plan.stages) if stage.recompute]
    return {
        "placement": f"on {plan.placement}",
        "microbatches": count(plan.num_microbatches, "microbatch", "microbatches"), "route": plan.route,
        "policy": plan.policy,
        "versions": "exact" if plan.is_synchronous else f"versions {','.join(map(str, plan.versions))}",
        "recompute": f"recompute in stage {', '.join(again)}" if again else "no recompute",
        "sharing": plan.sharing or "whole states",
        "hold": "as many held as the order needs" if plan.hold is None else f"{plan.hold} held",
        "buckets": f"buckets {','.join(str(stage.num_buckets) for stage in plan.stages)}",
    }  # fmt: skip


def _passed_over(found: Search) -> list[str]:
    faster = next((choice for choice in found.others if choice.step_s < found.best.step_s), None)
    if faster is None:
        return []
    gain = f"{found.best.step_s / faster.step_s - 1:.1%} faster ({seconds(faster.step_s)})"
    return [f"{shape(faster.plan)} would be {gain}: too little for {len(faster.plan.stages)} stages."]


def _settings(plan: Plan) -> str:
    """What else the plan says: `placement 0:0-6.0:7, 4 microbatches, split, 1f1b, versions 2,1`."""
    told = _traits(plan)
    others = {"versions": not plan.is_synchronous, "recompute": any(s.recompute for s in plan.stages)}
    also = [told[key] for key, is_set in {**others, "sharing": bool(plan.sharing)}.items() if is_set]
    return ", ".join([f"placement {plan.placement}", told["microbatches"], plan.route, plan.policy, *also])


def _summary(found: Search) -> dict[str, object]:
    names = ("why_no_data_parallel", "reason", "num_plans", "seconds", "num_simulated")
    return {
        "best": _as_plain(found.best), "others": [_as_plain(choice) for choice in found.others],
        "data_parallel": None if found.data_parallel is None else _as_plain(found.data_parallel),
        **{name: getattr(found, name) for name in names}, "plan": found.best.plan.to_dict(),
    }  # fmt: skip


def _as_plain(choice: Choice) -> dict[str, object]:
    plan = choice.plan
    return {
        "shape": shape(plan), "placement": plan.placement, "cuts": [stage.layers[0] for stage in plan.stages[1:]],
        "step_s": choice.step_s, "images_per_s": choice.images_per_s, "peak_bytes": list(choice.peak_bytes),
        "limit": choice.limit, "settings": _settings(plan), "cost": choice.cost,
    }  # fmt: skip
