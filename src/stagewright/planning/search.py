"""The best plan for a profile and a cluster, with its rivals and the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter

from stagewright.cluster import Cluster
from stagewright.cost import Costs
from stagewright.planning.balanced import balanced, pipedream_table, stage_table, thin_cuts
from stagewright.planning.candidates import Candidate, Leaders
from stagewright.planning.choose import Choice, Judge, Score, choose, compare, to_score
from stagewright.planning.exact import search_exactly
from stagewright.planning.options import PlanOptions
from stagewright.planning.problem import Problem, make_problem
from stagewright.planning.reasons import explain, shape
from stagewright.planning.spaces import Space, device_orders, given, group_sizes, runs, subsets
from stagewright.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Search:
    """The best plan, the runners-up, and plain data parallelism to compare with."""

    best: Choice
    others: tuple[Choice, ...]
    data_parallel: Choice | None
    why_no_data_parallel: str
    reason: str
    num_plans: int
    """How many the estimate has weighed."""
    num_simulated: int
    seconds: float


def make_plan(profile: Profile, cluster: Cluster, options: PlanOptions, score: Score | None = None) -> Search:
    """The fastest plan that fits: by the estimate, and among the best of those and around them by the score."""
    begin = perf_counter()
    problem = make_problem(Costs(profile, cluster), options)
    leaders, rivals = Leaders(most=12), Leaders(most=1)
    _search_data_parallel(problem, rivals)
    short = problem.shortage
    search(problem, leaders, rivals)
    judge = Judge(problem, score)
    rival, why_not = compare(problem, rivals, short, judge if problem.is_free else Judge(problem, score))
    best, *choices = choose(problem, to_score(leaders), judge)
    reason = explain(
        best.plan, best.step_s, problem.costs, rival.plan if rival else None, rival.step_s if rival else 0.0
    )
    others = {shape(c.plan): c for c in reversed(choices) if rival is None or len(c.plan.stages) > 1}
    others.pop(shape(best.plan), None)
    return Search(
        best=replace(best, plan=replace(best.plan, notes=(reason,))),
        others=tuple(sorted(others.values(), key=lambda choice: choice.step_s)[:3]),
        data_parallel=rival,
        why_no_data_parallel=why_not,
        reason=reason,
        num_plans=leaders.looked_at + rivals.looked_at,
        num_simulated=len(judge.known) if score is not None else 0,
        seconds=perf_counter() - begin,
    )


def _search_data_parallel(problem: Problem, rivals: Leaders) -> None:
    """Offers one stage on every device, with each number of microbatches; plain means exact training."""
    whole = (0, len(problem.costs.profile.layers))
    devices = problem.costs.cluster.device_ids
    for setting in problem.plain_settings():
        search_exactly(problem.estimator(setting), whole, given((devices,)), rivals)


def search(problem: Problem, leaders: Leaders, rivals: Leaders) -> None:
    """Fills the leaders: on few devices and layers with the best of all, else with balanced plans, improved."""
    costs, devices = problem.costs, problem.costs.cluster.device_ids
    # Up to here every cut and every group of devices is looked at; where a placement gives the devices, 64 cuts.
    small = len(devices) <= 6 and len(problem.cuts) - 1 <= 12
    spaces: list[Space] = [subsets(costs, devices)]
    if problem.is_free:
        for entry in rivals.found:
            leaders.offer(entry)
        _search_quickly(problem, leaders)
        if not small:
            return
    elif problem.groups is not None:
        spaces = [given(problem.groups)]
    elif not small:
        spaces = [runs(order, group_sizes(len(devices))) for order in device_orders(costs, devices)]
    cuts = problem.cuts if problem.every_cut else thin_cuts(costs, problem.cuts, 64)
    for setting in problem.settings(weighed=True):
        for space in spaces:
            search_exactly(problem.estimator(setting), cuts, space, leaders, every_cut=problem.every_cut)


def _search_quickly(problem: Problem, leaders: Leaders) -> None:
    """Balanced plans in each setting; of each number of stages the best two, of which the best five are improved."""
    starts: dict[int, Leaders] = {}
    for start in _balanced_starts(problem):
        best = starts.setdefault(len(start.groups), Leaders(most=2))
        for setting in problem.settings():
            if setting.staleness == start.setting.staleness:
                best.looked_at += 1
                found = problem.price(start._replace(setting=setting), best.limit_s(start.shape))
                if found is not None:
                    best.offer(found)
    leaders.looked_at += sum(each.looked_at for each in starts.values())
    entries = sorted((entry for each in starts.values() for entry in each.found), key=lambda entry: entry.rank)
    for entry in entries:
        leaders.offer(entry)
    for entry in entries[:5]:
        _improve(entry.candidate, problem, leaders)
    for entry in leaders.found[:3]:
        _slide(entry.candidate, problem, problem.cuts, leaders)
    cuts = thin_cuts(problem.costs, problem.cuts, 40)
    for here, setting in product([entry.candidate for entry in leaders.found[:3]], problem.settings()):
        # A cut and a number of microbatches may be better together, though neither is alone.
        other, is_other = here._replace(setting=setting), setting != here.setting
        is_other = is_other and setting.staleness == here.setting.staleness
        if is_other and problem.price(other, 1.12 * leaders.bound) is not None:
            _slide(other, problem, cuts, leaders)
    # Devices are exchanged, or left out, once nothing else helps; only the best three count, or they would crowd.
    apart = Leaders(most=3)
    for entry in leaders.found[:3]:
        _improve(entry.candidate, problem, apart, swaps=True)
    leaders.looked_at += apart.looked_at
    for entry in apart.found:
        leaders.offer(entry)


def _balanced_starts(problem: Problem) -> Iterator[Candidate]:
    """Plans that are balanced with few and with many microbatches, on devices in each good order.

    Then those that PipeDream's prices favour, so that none of ours is predicted to be slower than they are.
    """
    costs, counts, route = problem.costs, problem.counts, problem.routes[0]
    orders, sizes = device_orders(costs, costs.cluster.device_ids), group_sizes(len(costs.cluster.device_ids))
    few = sorted({counts[0], counts[len(counts) // 2]})
    for table, most, tried, among in ((stage_table, 40, few, orders), (pipedream_table, 256, counts[:1], orders[:1])):
        cuts = thin_cuts(costs, problem.cuts, most)
        for staleness, count, order in product(problem.stalenesses, tried, among):
            estimator = problem.estimator(problem.setting(count, route, staleness))
            yield from balanced(estimator, cuts, order, sizes, table)


def _improve(here: Candidate, problem: Problem, leaders: Leaders, *, swaps: bool = False) -> None:
    """Changes a candidate little by little while the estimate falls, and offers every step to the leaders."""
    now = _offer(here, problem, leaders, float("inf"))
    for _ in range(60):
        best: Candidate | None = None
        settings = (setting for setting in problem.settings() if setting.staleness == here.setting.staleness)
        for other in problem.around(here, settings, swaps=swaps):
            step_s = _offer(other, problem, leaders, now)
            if step_s < now:
                now, best = step_s, other
        if best is None:
            return
        here = best


def _offer(candidate: Candidate, problem: Problem, leaders: Leaders, now: float) -> float:
    """Offers a candidate that is faster than now; what it takes then, else what it took."""
    leaders.looked_at += 1
    found = problem.price(candidate, now * (1 - 1e-9))
    if found is None:
        return now
    leaders.offer(found)
    return found.step_s


def _slide(here: Candidate, problem: Problem, cuts: Sequence[int], leaders: Leaders) -> None:
    """Tries every place of every cut between its neighbours, one cut after the other, while the estimate falls."""
    found = problem.price(here)
    now, before = found.step_s if found is not None else float("inf"), float("inf")
    while now < before:
        before = now
        for number in range(1, len(here.edges) - 1):
            for cut in cuts:
                if here.edges[number - 1] < cut < here.edges[number + 1]:
                    other = here._replace(edges=(*here.edges[:number], cut, *here.edges[number + 1 :]))
                    step_s = _offer(other, problem, leaders, now)
                    if step_s < now:
                        now, here = step_s, other
