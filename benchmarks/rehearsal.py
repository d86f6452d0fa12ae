"""The measured comparison: our plans and the peers in the same emulated hosts, in turns, beside their predictions.

    python -m benchmarks.rehearsal suites/rehearsal.yaml --out DIR [--short] [--case NAME …] [--results FILE]

For each case hosts are emulated (or one card is cut into slices), the model's layers and the links are measured inside
them, plans are searched with that, and all contenders take turns. Every contender has processes of its own, which are
stopped (SIGSTOP) while others have their turns. DIR keeps everything; a case that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contender import MOMENT
from benchmarks.rehearsal_table import ALONE, write_results
from benchmarks.slices import Slices, sliced_card

from stagewright.cluster import Cluster, Link, find_cluster
from stagewright.errors import FileError, RunError, StagewrightError, UsageError
from stagewright.plan import Plan
from stagewright.planning.fixed import cut_by_ratio, fixed_plan, table_of
from stagewright.planning.options import PlanOptions
from stagewright.planning.search import make_plan, shape
from stagewright.profile import Profile
from stagewright.profiling.heap import keep_longer
from stagewright.record import Record
from stagewright.rehearsal import EmulatedHosts, emulated_hosts
from stagewright.rehearsal.measuring import measure_hosts
from stagewright.rehearsal.slices import slice_cluster
from stagewright.runtime.launch.local import seats_in, wait_for_workers, workers
from stagewright.runtime.launch.ssh import PORT
from stagewright.scheduling import make_schedule
from stagewright.schema import check_head, read_plain
from stagewright.simulation import simulate

FORMAT, CONTENDER = "stagewright.rehearsal", "benchmarks.contender"
SHORT_ROUNDS = 3
TURN_S = 1.0
"""How long a turn is at least: neighbours see the same machine the better, the shorter their turns are."""
LONG_STEP_S = 2.0
"""A step that takes longer is not spoilt by what a first one does once."""
HANGS_S = {"cpu": 600.0, "cuda": 60.0}
"""How long a contender may say nothing: NCCL between workers that share a card hangs now and then."""
GOES = 3
"""How often a contender on a card may begin that hangs."""

SPARE_BYTES = 4e9
"""What stays free on the machine, beside half as much again as the largest contender so far takes."""

Spec = Mapping[str, Any]
"""What a contender's workers are told."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one set of emulated hosts, or on slices of one card."""

    name: str
    model: str
    batch: int
    batch_sizes: tuple[int, ...]
    plans: tuple[Mapping[str, Any], ...]
    """Beside the planner's choices; as the options of `stagewright train`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the model, such as image_size."""
    cluster: str = ""
    bits_per_s: float = 0.0
    """The rate of every host's link, in place of the cluster file's."""
    slices: int = 0
    is_short: bool = False

    @property
    def device(self) -> str:
        return "cuda" if self.slices else "cpu"

    def hosts(self) -> Cluster:
        """The cluster, with the rate of the case."""
        if self.slices:
            return slice_cluster(self.slices)
        cluster = find_cluster(self.cluster)
        return replace(cluster, links=tuple(replace(link, bytes_per_s=self.bits_per_s / 8) for link in cluster.links))


def read_cases(path: Path) -> tuple[int, list[Case]]:
    """The rounds and the cases of a suite file; a case with several rates is one case at each: alexnet-4-300mbit."""
    body = check_head(read_plain(path), FORMAT, 1, str(path))
    cases = []
    for told in body["cases"]:
        try:
            rates = told.pop("bits_per_s", [0.0])
            made = Case(**{**told, "batch_sizes": tuple(told["batch_sizes"]), "plans": tuple(told["plans"])})
        except (TypeError, KeyError) as fault:
            raise FileError(f"{path}: case {told.get('name')}: {fault}") from None
        if bool(made.slices) == bool(made.cluster) or bool(made.cluster) != any(rates):
            raise UsageError(f"case {made.name}: expected cluster and bits_per_s, or slices")
        for number, rate in enumerate(rates):
            text = f"-{rate / 1e9:g}gbit" if rate >= 1e9 else f"-{rate / 1e6:g}mbit" if rate else ""
            short = made.is_short and number == 0
            cases.append(replace(made, name=made.name + text, bits_per_s=rate, is_short=short))
    return body.get("rounds", 5), cases


# ── who takes part ────────────────────────────────────────────────────────────────────────────────────────────────


def score(plan: Plan, profile: Profile, cluster: Cluster) -> Record:
    """The prediction of a plan."""
    return simulate(make_schedule(plan), profile, cluster, detail=False)


def find_plans(case: Case, profile: Profile, cluster: Cluster) -> tuple[dict[str, Plan], set[str]]:
    """The plans by name, and which of them are the planner's own: the exact one and the stale one."""

    found: dict[str, Plan] = {}

    def add(plan: Plan) -> str:
        plan, name = replace(plan, notes=()), title(plan)
        if found.get(name, plan) != plan:
            name = f"{name} ({plan.placement})"
        found[name] = plan
        return name

    searched = (PlanOptions(batch=case.batch, staleness=staleness) for staleness in ("0", "ssp"))
    scored = partial(score, profile=profile, cluster=cluster)
    chosen = {add(make_plan(profile, cluster, options, scored).best.plan) for options in searched}
    for wanted in case.plans:
        add(fixed_plan(profile, plan_options(wanted, case.batch), cluster))
    return found, chosen


def plan_options(wanted: Mapping[str, Any], batch: int) -> PlanOptions:
    """What a suite says of a plan, as the planner takes it."""
    names = {"microbatches": "num_microbatches", "schedule": "policy", "buckets": "num_buckets"}
    given = {names.get(key, key): tuple(value) if key == "cut" else value for key, value in wanted.items()}
    return PlanOptions(batch=batch, **given)


def title(plan: Plan) -> str:
    """`3-1 cut at fc1, 2 × 1f1b, buckets 4/1`."""
    parts = [shape(plan)]
    if len(plan.stages) > 1:
        parts.append(f"{plan.num_microbatches} × {plan.policy}" if plan.num_microbatches > 1 else "1 microbatch")
    if plan.route == "rotate":
        parts.append("rotate")
    if max(stage.num_buckets for stage in plan.stages) > 1:
        parts.append("buckets " + "/".join(str(stage.num_buckets) for stage in plan.stages))
    if plan.sharing:
        parts.append(plan.sharing)
    if not plan.is_synchronous:
        parts.append("versions " + ",".join(map(str, plan.versions)))
    return ", ".join(parts)


def find_peers(case: Case, profile: Profile, num_hosts: int) -> Iterator[dict[str, Any]]:
    """DDP, and torch's pipelining cut where its stages take the same time, of which the best number of microbatches
    stays; not on a card, where it sends by NCCL, which hangs between workers that share one."""
    yield {"kind": "ddp", "name": "torch DDP"}
    for stages in sorted({num_hosts, 2}):
        replicas, costs = num_hosts // stages, table_of(profile).costs("time")[:-1]
        if case.slices or num_hosts % stages or stages >= len(profile.layers):
            continue
        family = f"torch pipelining 1F1B, {stages} stages" + (f" × {replicas}" if replicas > 1 else "")
        cuts = list(cut_by_ratio(costs, [1.0] * stages))
        for number in (stages, 2 * stages):
            if case.batch // replicas % number == 0:
                name = f"{family}, {number} microbatches"
                yield {"kind": "pipelining", "name": name, "family": family, "cuts": cuts, "microbatches": number}


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Contender:
    """Processes that train in the hosts, and are stopped while others have their turns."""

    def __init__(self, spec: Spec, workers: Sequence[Any], pipe: int) -> None:
        self.name, self.spec, self.workers, self.pipe = spec["name"], spec, workers, pipe
        self.last_s = self.stopped_s = time.perf_counter()
        first_s = self.turn(1)
        fills = max(Plan.from_dict(spec["plan"]).versions) if spec["kind"] == "plan" else 1
        """While a pipeline without a flush fills, updates come as forwards were let in, not as later ones will."""
        self.step_s = first_s if first_s > LONG_STEP_S and fills == 1 else self.turn(fills)
        a_word_s = self.step_s * spec["steps_a_word"]
        # Without a flush updates come in bursts: two at least.
        self.words = max(min(fills, 2), min(20, round(TURN_S / a_word_s)))

    def turn(self, words: int) -> float:
        """Seconds a step until so many words more, without the time that it was stopped."""
        while self.has_told(0.0):  # before it was stopped
            self.hear()
        started, ahead_s = time.perf_counter(), self.stopped_s - self.last_s
        self.signal(signal.SIGCONT)
        for _ in range(words):
            self.hear()
        self.signal(signal.SIGSTOP)
        self.stopped_s = time.perf_counter()
        return (ahead_s + self.last_s - started) / words / self.spec["steps_a_word"]

    def has_told(self, within_s: float) -> bool:
        """Whether there is a moment to hear of, or will be soon."""
        return bool(select.select([self.pipe], [], [], within_s)[0])

    def hear(self) -> None:
        """Takes note of the next moment that it tells."""
        until = time.monotonic() + HANGS_S[self.spec["device"]]
        while not self.has_told(1.0):
            if not all(worker.is_alive() for worker in self.workers):
                raise RunError(f"a worker of {self.name} ended", f"see {self.spec['folder']}/logs")
            if time.monotonic() > until:
                raise RunError(f"{self.name} hangs", f"see {self.spec['folder']}/logs")
        (self.last_s,) = MOMENT.unpack(os.read(self.pipe, MOMENT.size))

    def signal(self, number: int) -> None:
        """Sends a signal to all of its processes."""
        for worker in self.workers:
            os.kill(worker.pid, number)


def running_in(folder: Path, hosts: EmulatedHosts | Slices, used: Sequence[int], port: int = PORT) -> Any:
    """Runs what FOLDER/contender.json says in the used hosts while the context lasts."""
    command = [sys.executable, "-m", CONTENDER, str(folder)]
    return workers(seats_in(command, hosts, used, port), folder / "logs", {"OMP_NUM_THREADS": "1"})


@contextmanager
def started(spec: Spec, hosts: EmulatedHosts | Slices, folder: Path, number: int) -> Iterator[Contender]:
    """A contender that has taken its first steps, until the context ends."""
    folder.mkdir(parents=True, exist_ok=True)
    pipe = folder / "pipe"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    told = {**spec, "pipe": os.fspath(pipe), "folder": os.fspath(folder)}
    (folder / "contender.json").write_text(json.dumps(told), encoding="utf-8")
    used = [id.host for id in Plan.from_dict(spec["plan"]).devices] if spec["kind"] == "plan" else spec["hosts"]
    where = Slices(1, {}) if spec.get("is_outside") else hosts
    file = os.open(pipe, os.O_RDWR)
    try:
        with running_in(folder, where, used, PORT + 1 + number) as running:
            yield Contender(told, running, file)
    finally:
        os.close(file)


def on_hosts(specs: Sequence[Spec], hosts: EmulatedHosts, folder: Path, rounds: int) -> dict[str, list[float]]:
    """By name each contender's seconds a step, round by round: as many take turns as are in memory at once."""
    turns_s: dict[str, list[float]] = {}
    families: dict[str, list[tuple[int, Spec]]] = {}
    for number, spec in enumerate(specs):
        families.setdefault(spec.get("family", spec["name"]), []).append((number, spec))
    left, largest = list(families.values()), 0.0
    while left:
        with ExitStack() as stack:
            group: list[Contender] = []
            while left and (not group or free_memory() > 1.5 * largest + SPARE_BYTES):
                family, before = left.pop(0), free_memory()
                group.append(stack.enter_context(fastest(family, hosts, folder)))
                largest = max(largest, before - free_memory())
            for number in range(rounds):
                # Who comes after whom matters: so they change places.
                for one in group[:: -1 if number % 2 else 1]:
                    turns_s.setdefault(one.name, []).append(one.turn(one.words))
    return turns_s


@contextmanager
def fastest(family: Sequence[tuple[int, Spec]], hosts: EmulatedHosts | Slices, folder: Path) -> Iterator[Contender]:
    """The fastest of a family, such as a peer with several numbers of microbatches; the others end before the turns."""
    best: Contender | None = None
    with ExitStack() as kept:
        for number, spec in family:
            with ExitStack() as own:
                one = own.enter_context(started(spec, hosts, folder / f"contender-{number}", number))
                if best is None or one.step_s < best.step_s:
                    kept.close()
                    best = one
                    kept.enter_context(own.pop_all())
        assert best is not None
        yield best


def free_memory() -> float:
    """Bytes that this machine can still give out."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    return int(found[1]) * 1024.0 if found else float("inf")


def on_card(specs: Sequence[Spec], slices: Slices, folder: Path, rounds: int) -> dict[str, list[float]]:
    """The same one after the other, for a card has not the memory for two; whoever hangs goes again."""
    turns_s: dict[str, list[float]] = {}
    for number, spec in enumerate(specs):
        for _ in range(GOES):
            try:
                with started(spec, slices, folder / f"contender-{number}", number) as one:
                    turns_s[one.name] = [one.turn(one.words) for _ in range(rounds)]
                break
            except RunError as fault:
                print(f"    {fault.what}", file=sys.stderr, flush=True)
    return turns_s


# ── a case ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_case(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """The result of a case, from its folder where it was run before."""
    done = folder / "result.json"
    if done.exists():
        return json.loads(done.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    began = time.perf_counter()
    with sliced_card(case.slices) if case.slices else emulated_hosts(case.hosts()) as hosts:
        profile, cluster = measured(case, hosts, folder)
        plans, chosen = find_plans(case, profile, cluster)
        take_turns = on_card if case.slices else on_hosts
        turns_s = take_turns(list(contenders(case, plans, profile, cluster)), hosts, folder, rounds)
    if ALONE not in turns_s:
        raise RunError(f"{case.name}: the limit did not come through", f"see the logs under {folder}")
    entries = [{"name": name, "step_s": turns, "is_chosen": name in chosen} for name, turns in turns_s.items()]
    for entry in entries:
        if (plan := plans.get(entry["name"])) is not None:
            entry |= {"predicted_s": score(plan, profile, cluster).median_step_s, "is_exact": plan.is_synchronous}
    result = {
        "case": case.name, "batch": case.batch, "entries": entries, "seconds": time.perf_counter() - began,
        "limit_s": median(turns_s[ALONE]) / core_share(cluster),
    }  # fmt: skip
    done.write_text(json.dumps(result), encoding="utf-8")
    return result


def contenders(case: Case, plans: Mapping[str, Plan], profile: Profile, cluster: Cluster) -> Iterator[Spec]:
    """What each contender's workers are told; those that take most memory come first."""
    every = list(range(len(cluster.hosts)))
    common = {
        "model": case.model, "options": dict(case.options), "batch": case.batch, "device": case.device, "threads": 1,
        "hosts": every, "steps_a_word": 5 if case.slices else 1,
    }  # fmt: skip
    yield from ({**common, **peer} for peer in find_peers(case, profile, len(every)))
    yield from ({**common, "kind": "plan", "name": name, "plan": plan.to_dict()} for name, plan in plans.items())
    alone = {} if case.slices else {"hosts": [0], "threads": round(num_cores(cluster)), "is_outside": True}
    yield {**common, "kind": "alone", "name": ALONE, **alone}


def num_cores(cluster: Cluster) -> float:
    """The cores of the machine that the hosts are parts of."""
    return cluster.cores or float(len(os.sched_getaffinity(0)))


def core_share(cluster: Cluster) -> float:
    """The cores that the hosts may use together, against those of the single process."""
    shares = [host.cpu_share for host in cluster.hosts if host.cpu_share is not None]
    return sum(shares) / num_cores(cluster) if len(shares) == len(cluster.hosts) else 1.0


def measured(case: Case, hosts: EmulatedHosts | Slices, folder: Path) -> tuple[Profile, Cluster]:
    """The profile and the cluster as the hosts showed them."""
    profile, cluster = measure_hosts(
        case.hosts(), hosts, folder / "measured", model=case.model, options=case.options, batch_sizes=case.batch_sizes,
        device=hosts.device if isinstance(hosts, Slices) else "cpu",
    )  # fmt: skip
    if isinstance(hosts, Slices):
        cluster = with_all_at_once(cluster, hosts, folder / "links")
    profile.save(folder / "profile.json")
    cluster.save(folder / "cluster.yaml")
    return profile, cluster


def with_all_at_once(cluster: Cluster, slices: Slices, folder: Path) -> Cluster:
    """Slices joined pair by pair, as fast as each is in an all-reduce of all, behind what one moves with all others.

    A connection has one thread, which several are faster than, and all go through the memory of one machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    every = range(len(cluster.hosts))
    told = {"kind": "links", "device": slices.device, "threads": 1, "num_bytes": 16 << 20}
    (folder / "contender.json").write_text(json.dumps(told), encoding="utf-8")
    with running_in(folder, slices, every) as running:
        assert not wait_for_workers(running), f"see {folder}/logs"
    seen = [json.loads((folder / f"links-{host}.json").read_text(encoding="utf-8")) for host in every]
    one, each = (median(rates[key] for rates in seen) for key in ("one", "each"))
    return joined(cluster, one, each, latency_s=2 * cluster.links[0].latency_s)


def joined(cluster: Cluster, one: float, each: float, latency_s: float) -> Cluster:
    """Slices joined pair by pair at a rate of `each`, behind the rate of `one`, which is a slice's with all others."""
    inner = tuple(replace(link, bytes_per_s=one) for link in cluster.hosts[0].links)
    links = tuple(
        Link(ends=(f"{a}:nic", f"{b}:nic"), kind="NET", bytes_per_s=each, latency_s=latency_s)
        for a, b in combinations(range(len(cluster.hosts)), 2)
    )
    return replace(cluster, hosts=tuple(replace(host, links=inner) for host in cluster.hosts), links=links)


def main() -> None:
    """Runs a suite and writes its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal", description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--short", action="store_true", help="only the short cases, in fewer rounds")
    parser.add_argument("--case", action="append", help="only this case; may be repeated")
    parser.add_argument("--results", type=Path, help="a Markdown file whose section on rehearsals is renewed")
    given = parser.parse_args()
    keep_longer()  # for the process that workers are forked of
    try:
        run_suite(given)
    except StagewrightError as fault:
        print(f"error: {fault.what}" + (f"\n       {fault.todo}" if fault.todo else ""), file=sys.stderr)
        sys.exit(2)


def run_suite(given: argparse.Namespace) -> None:
    """Every wanted case, then the table."""
    rounds, cases = read_cases(given.suite)
    cases = [case for case in cases if case.is_short or not given.short]
    cases = [case for case in cases if not given.case or case.name in given.case]
    if not cases:
        raise UsageError(f"no case of {given.suite} is called {given.case}", "see the names in the file")
    results, failed = [], []
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.name}", file=sys.stderr, flush=True)
        try:
            results.append(run_case(case, given.out / case.name, SHORT_ROUNDS if given.short else rounds))
        except StagewrightError as fault:
            failed.append(case.name)
            print(f"    failed: {fault.what}: {fault.todo}", file=sys.stderr, flush=True)
            continue
        entries, seconds = results[-1]["entries"], results[-1]["seconds"]
        print(f"    {seconds:.0f} s, {len(entries)} contenders", file=sys.stderr, flush=True)
    if results:
        write_results(results, given.results)
    if failed:
        raise RunError(f"{', '.join(failed)} failed", f"see the logs under {given.out}; cases that are done stay")


if __name__ == "__main__":
    main()
