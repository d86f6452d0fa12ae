"""The measured comparison: our plans and the peers, in the same emulated hosts, in turns, beside their predictions.

    python -m stagewright.bench.rehearsed suites/rehearsal.yaml --out DIR [--short] [--case NAME …] [--results FILE]

For each case hosts are emulated, the model's layers and the links are measured inside them, plans are searched with
that, and all contenders take turns. Machines drift: passes over the model take turns with the plans and a pulse beats
beside them, and plans are brought to the speed of the profile. DIR keeps everything; a case that is there already is
not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from stagewright.bench.contest import ALONE, PASSES, WEIGHTS
from stagewright.bench.entrants import candidates, groups, limit, passes, peers
from stagewright.bench.rehearsal_cases import RehearsalCase, RehearsalSuite
from stagewright.bench.rounds import Told
from stagewright.bench.speed import at_one_speed, drifts_of, predict
from stagewright.bench.verdict import CaseResult, Entry, write_results
from stagewright.cluster import Cluster, count
from stagewright.errors import RunError, StagewrightError, UsageError
from stagewright.models import build_model
from stagewright.plan import Plan
from stagewright.profile import Kernels
from stagewright.profiling.kernels import faster_kernels
from stagewright.rehearsal import emulated_hosts
from stagewright.rehearsal.beating import beating
from stagewright.rehearsal.forks import launch_in_hosts, workers_in_hosts
from stagewright.rehearsal.hosts import EmulatedHosts
from stagewright.rehearsal.measuring import Measured, Request, measure_hosts
from stagewright.rehearsal.slices import sliced_card
from stagewright.runtime.hosts import PORT, HostError, Hosts

CONTEST, PULSE = "stagewright.bench.contest", "pulse.bin"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TURN_S = 1.0
"""How long a turn is at least: neighbours see the same machine the better, the shorter their turns are."""
SHORT_ROUNDS = 3
MORE_GOES = 2
"""How often those who hang on a card go again: NCCL between workers that share one hangs now and then."""


class Bench:
    """Runs cases one after the other and keeps what they share: profiles of the same hosts."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.known: dict[str, Measured] = {}
        self.faster: dict[str, Kernels] = {}

    def run(self, case: RehearsalCase) -> CaseResult:
        """The result of a case, from its folder where it was run before."""
        folder = self.folder / case.name
        done = folder / "result.json"
        if done.exists():
            return CaseResult.load(done)
        folder.mkdir(parents=True, exist_ok=True)
        started = perf_counter()
        with emulated_hosts(case.hosts()) if case.slices is None else sliced_card(case.slices) as hosts:
            profile, cluster, beats = self.measured(case, hosts, folder)
            assert profile is not None
            plans, chosen, expected = candidates(case, profile, cluster)
            ours: list[dict[str, Any]] = [
                {"kind": "plan", "name": name, "plan": plan.to_dict(), "expected_s": expected[name],
                 "is_chosen": name in chosen, "is_exact": plan.is_synchronous}
                for name, plan in sorted(plans.items(), key=lambda item: not item[1].is_synchronous)
            ]  # fmt: skip
            told = [limit(case), *passes(case, profile), *ours, *peers(case, profile, cluster)]
            times = self.contest(case, hosts, groups(case, told, profile), folder)
        if len(times["step_s"].get(ALONE, ())) < self.rounds:
            raise RunError(f"{case.name}: the limit did not come through", f"see the logs under {folder}")
        entries, drifts = [], [1.0]
        known = drifts_of(times, folder / PULSE, beats)
        for name, rounds in times["step_s"].items():
            if len(rounds) < self.rounds or name == PASSES:
                continue  # it hung every time, or is none
            entry = Entry(name=name, step_s=tuple(rounds), is_chosen=name in chosen)
            if name in plans:
                plan, own = plans[name], known[name]
                entry = replace(
                    entry, predicted_s=predict(plan, profile, cluster), is_exact=plan.is_synchronous,
                    is_continued=case.slices is None and not plan.is_synchronous,
                    even_s=at_one_speed(rounds, own, plan, profile, cluster),
                )  # fmt: skip
                drifts += own
            entries.append(entry)
        result = CaseResult(
            case=case.name, batch=case.batch, rounds=self.rounds, entries=tuple(entries),
            kernels=self.kernels(case), slowest=max(drifts), fastest=min(drifts),
            core_share=core_share(cluster) if case.slices is None else 1.0, seconds=perf_counter() - started,
        )  # fmt: skip
        result.save(done)
        return result

    def kernels(self, case: RehearsalCase) -> Kernels:
        """What everyone computes with on this machine: whatever passes over the model in less time."""
        if case.device == "cuda":
            return "onednn"
        key = json.dumps([case.model, dict(case.options)])
        if key not in self.faster:
            torch.set_num_threads(1)  # as workers do
            self.faster[key] = faster_kernels(build_model(case.model, **case.options), case.batch_sizes[0])
        return self.faster[key]

    def measured(self, case: RehearsalCase, hosts: Hosts, folder: Path) -> Measured:
        """The profile and the cluster as the hosts showed them; layers are timed once for hosts of the same shares."""
        cluster = case.hosts()
        shares = [host.cpu_share for host in cluster.hosts]
        key = json.dumps([case.model, dict(case.options), case.batch_sizes, shares])
        known = self.known.get(key)
        sizes = () if known else case.batch_sizes
        request = Request(
            model=case.model,
            options=case.options,
            batch_sizes=sizes,
            device=case.device,
            kernels=self.kernels(case),
        )
        found = measure_hosts(cluster, hosts, request, folder / "measured")
        if known is not None:
            devices = tuple(map(same_devices, found.cluster.hosts, known.cluster.hosts))
            cluster = replace(found.cluster, hosts=devices, crowding=known.cluster.crowding)
            found = known._replace(cluster=cluster)
        self.known[key] = found
        assert found.profile is not None
        found.profile.save(folder / "profile.json")
        found.cluster.save(folder / "cluster.yaml")
        return found

    def contest(
        self,
        case: RehearsalCase,
        hosts: Hosts,
        groups: Sequence[Sequence[Told]],
        folder: Path,
    ) -> dict[str, Any]:
        """Each contender's seconds a step, round by round, and when these were.

        Whoever is not in memory at once has processes of his own: only they give all of it back. On a card contenders
        come one after the other. Where one hangs, those before it count, and the rest goes again.
        """
        spec = {
            "model": case.model, "options": dict(case.options), "batch": case.batch, "rounds": self.rounds,
            "turn_s": TURN_S, "cores": num_cores(case.hosts()), "groups": groups, "device": case.device,
            "kernels": self.kernels(case),
        }  # fmt: skip
        times: dict[str, Any] = {"step_s": {}, "when": {}}
        with common_weights(case, folder), beating(folder / PULSE) if case.device == "cpu" else nullcontext():
            for those in self.goes(case, groups, times):
                for key, more in one_go(case, hosts, {**spec, "groups": those}, folder).items():
                    times[key].update(more)
        for name, told in (("contest", spec), ("times", times)):  # of all goes
            (folder / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")
        return times

    def goes(
        self, case: RehearsalCase, groups: Sequence[Sequence[Told]], times: Mapping[str, Any]
    ) -> Iterator[list[Sequence[Told]]]:
        """Who goes together: on hosts a group, on a card all who are not through yet."""
        if case.slices is None:
            yield from ([group] for group in groups)
            return
        for _ in range(1 + MORE_GOES):
            left = [group for group in groups if not self.is_through(group, times)]
            if left:
                yield left

    def is_through(self, group: Sequence[Told], times: Mapping[str, Any]) -> bool:
        """Whether everyone in a group has had all turns."""
        return all(len(times["step_s"].get(told["name"], ())) >= self.rounds for told in group)


def one_go(case: RehearsalCase, hosts: Hosts, spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The times of a contest; on a card, where one hangs, of those before it."""
    seen = folder / "times.json"
    seen.unlink(missing_ok=True)
    needs_alone = any(told["kind"] == "alone" for group in spec["groups"] for told in group)
    with ExitStack() as stack:
        those = [started_frozen(stack, hosts, spec, group, folder) for group in spec["groups"]]
        (folder / "contest.json").write_text(json.dumps({**spec, "groups": those}), encoding="utf-8")
        stack.enter_context(single_process(folder) if needs_alone else nullcontext())
        try:
            launch_in_hosts(CONTEST, folder, hosts, ONE_THREAD, uses_card=case.device == "cuda")
        except HostError:
            if case.slices is None:
                raise
    times: dict[str, Any] = {"step_s": {}, "when": {}}
    return json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else times


def started_frozen(
    stack: ExitStack, hosts: Hosts, spec: Mapping[str, Any], group: Sequence[Told], folder: Path
) -> list[Told]:
    """A group whose pipelines without a flush have processes of their own, which end with the stack.

    They come first: until the contest stops them, they take others' time. On a card they run in the contest's workers.
    """
    if not isinstance(hosts, EmulatedHosts):
        return list(group)
    frozen: list[Told] = []
    others = [told for told in group if told["kind"] != "plan" or told["is_exact"]]
    for number, told in enumerate(told for told in group if told not in others):
        own = folder / f"frozen-{number}"
        own.mkdir(exist_ok=True)
        pipe = own / "pipe"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        names = {"pipe": os.fspath(pipe), "weights": os.fspath(folder / WEIGHTS)}
        asked = {**spec, **names, "groups": [], "plan": told["plan"]}
        (own / "contest.json").write_text(json.dumps(asked), encoding="utf-8")
        workers = stack.enter_context(workers_in_hosts(CONTEST, own, hosts, ONE_THREAD, PORT + 1 + number))
        frozen.append(
            {**told, "kind": "frozen", "processes": [worker.pid for worker in workers], "pipe": os.fspath(pipe),
             "versions": max(Plan.from_dict(told["plan"]).versions), "logs": os.fspath(own / "logs")}
        )  # fmt: skip
    return [*frozen, *others]


@contextmanager
def common_weights(case: RehearsalCase, folder: Path) -> Iterator[None]:
    """The weights that everyone in a contest begins with, in a file while it lasts."""
    torch.save(build_model(case.model, **case.options).model.state_dict(), folder / WEIGHTS)
    try:
        yield
    finally:
        (folder / WEIGHTS).unlink()


@contextmanager
def single_process(folder: Path) -> Iterator[None]:
    """The single process of a contest, while it lasts."""
    with (folder / "alone.log").open("wb") as log:
        alone = subprocess.Popen([sys.executable, "-m", CONTEST, folder, "alone"], stdout=log, stderr=subprocess.STDOUT)
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


def core_share(cluster: Cluster) -> float:
    """The cores that the hosts may use together, against those of the machine."""
    shares = [host.cpu_share for host in cluster.hosts]
    used = sum(share for share in shares if share is not None) if all(shares) else num_cores(cluster)
    return used / num_cores(cluster)


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
    results, failed = [], []
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.name}", file=sys.stderr, flush=True)
        try:
            results.append(bench.run(case))
        except StagewrightError as fault:
            failed.append(case.name)
            print(f"    failed: {fault.what}", file=sys.stderr, flush=True)
            continue
        print(f"    {results[-1].seconds:.0f} s, {count(len(results[-1].entries), 'contender')}", file=sys.stderr)
    if results:
        write_results(results, given.results)
    if failed:
        raise RunError(f"{', '.join(failed)} failed", f"see the logs under {given.out}; cases that are done stay")


if __name__ == "__main__":
    main()
