"""The measured comparison: our plans and the peers, in the same emulated hosts, in turns, beside their predictions.

    python -m stagewright.bench.rehearsed suites/rehearsal.yaml --out DIR [--short] [--case NAME …] [--results FILE]

For each case hosts are emulated, the model's layers and the links are measured inside them, plans are searched with
that, and all contenders take turns. Machines drift: before and after each turn of a plan the hosts pass over the model
as they did when they were profiled, and its prediction is for the speed of that time. DIR keeps everything; a case that
is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

from pydantic import Field

from stagewright.bench.baselines import has_deepspeed
from stagewright.bench.contest import ALONE, PASS_S
from stagewright.bench.memory import free_memory, in_groups
from stagewright.bench.verdict import DDP, CaseResult, Entry, write_results
from stagewright.cluster import Cluster, DeviceId, count, find_cluster
from stagewright.cost import Costs
from stagewright.errors import StagewrightError, UsageError
from stagewright.noun import Saved, noun
from stagewright.plan import Plan, Policy, Route
from stagewright.planning.fixed import fixed_plan
from stagewright.planning.options import PlanOptions
from stagewright.planning.ratio import cut_by_ratio, table_of
from stagewright.planning.reasons import shape
from stagewright.planning.search import Search, make_plan
from stagewright.profile import Profile
from stagewright.profiling.inside import pass_rows
from stagewright.record import Record
from stagewright.rehearsal import emulated_hosts
from stagewright.rehearsal.measuring import Request, alike, busy_together, measure_hosts
from stagewright.rehearsal.slices import slice_cluster, sliced_card
from stagewright.runtime.hosts import PORT, HostError, Hosts, host_commands, launch_hosts
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate

TURN_S = 2.0
FAR_BEHIND = 3.0
"""Data parallelism is no contender of ours where it is predicted to take so many times as long: DDP is one anyway."""
SHORT_ROUNDS = 3


@noun(error=UsageError)
class Wanted:
    """One plan that a case runs beside the planner's choice."""

    placement: str = ""
    cut: tuple[str, ...] = ()
    microbatches: int = Field(default=1, ge=1)
    schedule: Policy | None = None
    staleness: str | None = None
    route: Route | None = None
    buckets: int | None = Field(default=None, ge=1)

    def options(self, batch: int) -> PlanOptions:
        """As the planner takes them."""
        return PlanOptions(
            batch=batch, placement=self.placement, cut=self.cut, num_microbatches=self.microbatches,
            staleness=self.staleness, policy=self.schedule, route=self.route, num_buckets=self.buckets,
        )  # fmt: skip


@noun(error=UsageError)
class RehearsalCase:
    """One model on one set of emulated hosts, or on slices of one card."""

    name: str
    model: str
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Of the model, such as image_size."""
    batch: int = Field(ge=1)
    cluster: str | None = None
    bits_per_s: tuple[float, ...] = ()
    """The rates of every host's link, in place of the cluster file's: one case each."""
    slices: int | None = Field(default=None, ge=2)
    """So many slices of the card of this machine, in place of a cluster."""
    batch_sizes: tuple[int, ...] = Field(min_length=2)
    """The rows at which layers are timed."""
    plans: tuple[Wanted, ...] = Field(min_length=3)
    is_short: bool = False
    """Whether `--short` runs it, at the first of the rates."""

    def __post_init__(self) -> None:
        if (self.cluster is None) != (self.slices is not None) or (self.cluster is None) != (not self.bits_per_s):
            raise UsageError(f"case {self.name}: expected cluster and bits_per_s, or slices")

    @property
    def device(self) -> str:
        """What it computes on."""
        return "cpu" if self.slices is None else "cuda"

    def each_rate(self) -> Iterator[RehearsalCase]:
        """The case at each of its rates: alexnet-4 at 300 Mbit/s is alexnet-4-300mbit; slices have but one."""
        if self.slices is not None:
            yield self
        for number, rate in enumerate(self.bits_per_s):
            text = f"{rate / 1e9:g}gbit" if rate >= 1e9 else f"{rate / 1e6:g}mbit"
            short = self.is_short and number == 0
            yield replace(self, name=f"{self.name}-{text}", bits_per_s=(rate,), is_short=short)

    def hosts(self) -> Cluster:
        """The cluster, with the (first) rate of the case."""
        if self.cluster is None:
            return slice_cluster(self.slices or 0)
        cluster = find_cluster(self.cluster)
        rate = self.bits_per_s[0] / 8
        return replace(cluster, links=tuple(replace(link, bytes_per_s=rate) for link in cluster.links))


@noun(error=UsageError)
class RehearsalSuite(Saved):
    """Cases of a measured comparison."""

    FORMAT: ClassVar[str] = "stagewright.rehearsal"
    ERROR: ClassVar[type[StagewrightError]] = UsageError

    name: str
    rounds: int = Field(default=5, ge=1)
    cases: tuple[RehearsalCase, ...] = Field(min_length=1)


class Bench:
    """Runs cases one after the other and keeps what they share: profiles of the same hosts."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.profiles: dict[str, tuple[Profile, Cluster]] = {}

    def run(self, case: RehearsalCase) -> CaseResult:
        """The result of a case, from its folder where it was run before."""
        folder = self.folder / case.name
        done = folder / "result.json"
        if done.exists():
            return CaseResult.load(done)
        folder.mkdir(parents=True, exist_ok=True)
        started = perf_counter()
        with emulated_hosts(case.hosts()) if case.slices is None else sliced_card(case.slices) as hosts:
            profile, cluster = self.measured(case, hosts, folder)
            plans, chosen = candidates(case, profile, cluster)
            passes = pass_over(profile, cluster) if case.slices is None else None
            told: list[dict[str, Any]] = [limit(case)]
            told += ({"kind": "plan", "name": name, "plan": plan.to_dict()} for name, plan in plans.items())
            told += peers(case, profile, cluster)
            times = self.contest(case, hosts, groups(case, told, profile), passes, folder)
        drifts = drifts_of(times["pass_s"], passes, profile)
        usual = [median(drift for rounds in drifts.values() for drift in rounds) if drifts else 1.0] * self.rounds
        predictions = {
            name: Prediction(plan, profile, cluster, drifts.get(name, usual)) for name, plan in plans.items()
        }
        made = {name: rounds for name, rounds in times["step_s"].items() if len(rounds) == self.rounds}
        result = make_result(case, cluster, predictions, chosen, made, perf_counter() - started)
        result.save(done)
        return result

    def measured(self, case: RehearsalCase, hosts: Hosts, folder: Path) -> tuple[Profile, Cluster]:
        """The profile and the cluster as the hosts showed them; layers are timed once for hosts of the same shares."""
        cluster = case.hosts()
        shares = [host.cpu_share for host in cluster.hosts]
        key = json.dumps([case.model, dict(case.options), case.batch_sizes, shares])
        known = self.profiles.get(key)
        sizes = () if known else case.batch_sizes
        request = Request(model=case.model, options=case.options, batch_sizes=sizes, device=case.device)
        profile, found = measure_hosts(cluster, hosts, request, folder / "measured")
        if profile is None:
            assert known is not None
            profile = known[0]
            devices = tuple(map(same_devices, found.hosts, known[1].hosts))
            found = replace(found, hosts=devices, crowding=known[1].crowding)
        self.profiles[key] = (profile, found)
        profile.save(folder / "profile.json")
        found.save(folder / "cluster.yaml")
        return profile, found

    def contest(
        self,
        case: RehearsalCase,
        hosts: Hosts,
        groups: Sequence[Mapping[str, Any]],
        passes: Mapping[str, Any] | None,
        folder: Path,
    ) -> dict[str, dict[str, list[float]]]:
        """Each contender's seconds a step, and those of the passes around it, round by round."""
        cores = num_cores(case.hosts())
        spec = {
            "model": case.model, "options": dict(case.options), "batch": case.batch, "rounds": self.rounds,
            "turn_s": TURN_S, "cores": cores, "groups": groups, "device": case.device, "pass": passes,
        }  # fmt: skip
        (folder / "contest.json").write_text(json.dumps(spec), encoding="utf-8")
        command = ["-m", "stagewright.bench.contest", str(folder)]
        with single_process(command, folder) if case.slices is None else nullcontext():
            commands = host_commands(command, hosts, [1] * len(hosts.addresses), PORT)
            try:
                launch_hosts(commands, folder, {**hosts.environment(), "OMP_NUM_THREADS": "1"})
            except HostError:
                # On a card contenders come one after the other: those before the one that hung count.
                if case.slices is None or not (folder / "times.json").exists():
                    raise
        times: dict[str, dict[str, list[float]]] = json.loads((folder / "times.json").read_text(encoding="utf-8"))
        return times


@contextmanager
def single_process(command: Sequence[str], folder: Path) -> Iterator[None]:
    """The single process of a contest, while it lasts."""
    with (folder / "alone.log").open("wb") as log:
        alone = subprocess.Popen([sys.executable, *command, "alone"], stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            alone.kill()
            alone.wait()


def num_cores(cluster: Cluster) -> int:
    """The cores of the machine that the hosts are parts of."""
    return round(cluster.cores or sum(host.cpu_share or 1.0 for host in cluster.hosts))


def same_devices(host: Any, known: Any) -> Any:
    """A host with the devices that were measured before."""
    return replace(host, devices=known.devices)


def candidates(case: RehearsalCase, profile: Profile, cluster: Cluster) -> tuple[dict[str, Plan], tuple[str, ...]]:
    """The plans by name, and which of them are the planner's own: the exact one and the stale one."""
    costs = Costs(profile, cluster)

    def score(plan: Plan) -> Record:
        return simulate(make_schedule(plan), profile, cluster, detail=False, costs=costs)

    found: dict[str, Plan] = {}
    chosen = []
    for staleness in ("0", "ssp"):
        search = make_plan(profile, cluster, PlanOptions(batch=case.batch, staleness=staleness), score)
        chosen.append(add(found, best_that_runs(search, cluster)))
    whole, best = fixed_plan(profile, PlanOptions(batch=case.batch), cluster), found[chosen[0]]
    if score(whole).median_step_s < FAR_BEHIND * score(best).median_step_s:
        add(found, whole)
    for wanted in case.plans:
        add(found, fixed_plan(profile, wanted.options(case.batch), cluster))
    return found, tuple(chosen)


def best_that_runs(search: Search, cluster: Cluster) -> Plan:
    """The planner's choice; where a contest cannot run it, the best of its rivals that it can."""
    for rival in (search.best, *search.others):
        with suppress(UsageError):
            return on_first_hosts(rival.plan, cluster)
    return on_first_hosts(search.best.plan, cluster)


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


class Prediction:
    """What the simulator says of a plan: at the speed of the profile, and at that of each round."""

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster, drifts: Sequence[float]) -> None:
        schedule = make_schedule(plan)

        def at(drift: float) -> float:
            later = replace(cluster, core_s_per_byte=cluster.core_s_per_byte * drift)
            return simulate(schedule, slowed(profile, drift), later, detail=False).median_step_s

        self.plan, self.drifts = plan, drifts
        self.profiled_s = at(1.0)
        self.round_s = tuple(map(at, drifts))


def limit(case: RehearsalCase) -> dict[str, str]:
    """What nobody can beat: one process with all cores, or each slice of a card alone with its rows."""
    return {"kind": "alone" if case.slices is None else "each alone", "name": ALONE}


def groups(case: RehearsalCase, told: Sequence[Mapping[str, Any]], profile: Profile) -> list[dict[str, Any]]:
    """Who is in memory at once; a card has not the memory for two, and keeps its speed without anyone looking."""
    if case.slices is not None:
        return [{"contenders": [each], "passes": False} for each in told]
    return list(in_groups(told, profile, len(case.hosts().hosts), free_memory()))


def pass_over(profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Passes over the model between the turns, on the hosts that made the profile: with how many rows, how often."""
    rows = pass_rows(profile, PASS_S)
    times = max(1, round(PASS_S / profile.model_s[profile.batch_sizes.index(rows)]))
    hosts = busy_together(cluster)
    return {"hosts": hosts, "counted": [n for n in hosts if n in alike(cluster, 0)], "rows": rows, "times": times}


def drifts_of(
    pass_s: Mapping[str, Sequence[float]], passes: Mapping[str, Any] | None, profile: Profile
) -> dict[str, list[float]]:
    """For each plan, round by round, how many times as long as in the profile a pass took around its turn."""
    if passes is None:
        return {}
    usual_s = profile.model_s[profile.batch_sizes.index(passes["rows"])]
    return {name: [seconds / usual_s for seconds in rounds] for name, rounds in pass_s.items()}


def slowed(profile: Profile, drift: float) -> Profile:
    """The profile of a machine that takes so many times as long for everything."""

    def times(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(each * drift for each in seconds)

    layers = tuple(
        replace(layer, forward_s=times(layer.forward_s), backward_s=times(layer.backward_s)) for layer in profile.layers
    )
    optimizer_s = profile.optimizer_s * drift
    return replace(profile, layers=layers, optimizer_s=optimizer_s, model_s=times(profile.model_s))


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


def make_result(
    case: RehearsalCase, cluster: Cluster, predictions: Mapping[str, Prediction], chosen: Sequence[str],
    times: Mapping[str, Sequence[float]], seconds: float,
) -> CaseResult:  # fmt: skip
    """What a case came to."""
    entries = []
    for name, values in times.items():
        told = predictions.get(name)
        entry = Entry(name=name, step_s=tuple(values), is_chosen=name in chosen)
        if told is not None:
            is_exact = told.plan.is_synchronous
            entry = replace(entry, predicted_s=told.round_s, profiled_s=told.profiled_s, is_exact=is_exact)
        entries.append(entry)
    shares = [host.cpu_share for host in cluster.hosts]
    used = sum(share for share in shares if share is not None) if all(shares) else num_cores(cluster)
    return CaseResult(
        case=case.name, batch=case.batch, entries=tuple(entries), seconds=seconds,
        rounds=len(next(iter(times.values()))), core_share=used / num_cores(cluster) if case.slices is None else 1.0,
        drift=median(drift for told in predictions.values() for drift in told.drifts),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a suite and writes its table."""
    parser = argparse.ArgumentParser(prog="python -m stagewright.bench.rehearsed", description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--short", action="store_true", help="only the short cases, in fewer rounds")
    parser.add_argument("--case", action="append", help="only this case; may be repeated")
    parser.add_argument("--results", type=Path, help="a Markdown file whose section on rehearsals is renewed")
    given = parser.parse_args(arguments)
    try:
        run_suite(given)
    except StagewrightError as fault:
        print(f"error: {fault.what}" + (f"\n       {fault.todo}" if fault.todo else ""), file=sys.stderr)
        sys.exit(2)


def run_suite(given: argparse.Namespace) -> None:
    """Every wanted case, then the table."""
    suite = RehearsalSuite.load(given.suite)
    cases = [case for each in suite.cases for case in each.each_rate() if case.is_short or not given.short]
    cases = [case for case in cases if not given.case or case.name in given.case]
    if not cases:
        raise UsageError(f"no case of {given.suite} is called {given.case}", "see the names in the file")
    bench = Bench(given.out, SHORT_ROUNDS if given.short else suite.rounds)
    results = []
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.name}", file=sys.stderr, flush=True)
        results.append(bench.run(case))
        print(f"    {results[-1].seconds:.0f} s, {count(len(results[-1].entries), 'contender')}", file=sys.stderr)
    write_results(results, given.results)


if __name__ == "__main__":
    main()
