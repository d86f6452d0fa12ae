"""What plans cost: the cheapest, the fastest under a cost, the curve between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import stagewright as sw
from stagewright.cli.plan import plan
from stagewright.cluster import Cluster, Device, DeviceId, Host, Link
from stagewright.errors import StagewrightError
from stagewright.planning import money
from stagewright.planning.fixed import fixed_plan
from stagewright.planning.money import with_one_more
from stagewright.planning.options import PlanOptions
from stagewright.planning.search import Search, make_plan
from stagewright.simulation import simulator
from tests.planning.cases import GIB, MIB, chain
from tests.profiling.test_cli import run

QUICK: dict[str, Any] = {"num_microbatches": 2, "policy": "1f1b", "route": "split", "recompute": False}
WORDS = ("--microbatches", 2, "--schedule", "1f1b", "--route", "split", "--no-simulate")
NET = chain((0.1, 0.1, 0.1, 0.02), weights=(MIB, MIB, MIB, 300 * MIB))


def cluster_of(*priced: tuple[float, float | None], rate: float = 1e9) -> Cluster:
    """Devices of such a speed and price on one hub."""
    devices = tuple(Device(kind="cpu", memory_bytes=16 * GIB, speed=v, price_per_h=p) for v, p in priced)
    links = tuple(Link(ends=(str(at), "hub"), kind="x", bytes_per_s=rate) for at in range(len(priced)))
    return Cluster(name="priced", hosts=(Host(devices=devices, links=links),))


FOUR = cluster_of((1.0, 1.0), (1.0, 1.0), (2.0, 1.5), (4.0, 9.0))


def test_a_plan_costs_what_the_devices_cost_that_it_uses() -> None:
    found, curve = choose(FOUR, PlanOptions(batch=24, placement="0:0-2"))
    assert curve == ()
    assert found.best.cost == pytest.approx(3.5 / 3600 * found.best.step_s * 1e6 / 24)
    one = sw.make_plan(NET, cluster_of((1.0, 1.0), (1.0, None)), PlanOptions(batch=24, placement="0:1"))
    assert one.best.cost is None


def choose(
    cluster: Cluster, options: PlanOptions, *wish: Any, judged: bool = False
) -> tuple[Search, tuple[Search, ...]]:
    score = simulator(NET, cluster) if judged else None
    return money.choose(partial(make_plan, NET, cluster, options, score), cluster, *wish)


@pytest.mark.parametrize("prices", [(1.0, 1.0, 1.5, 9.0), (1.0, 1.0, 4.0, 4.0), (3.0, 1.0, 2.0, 0.5)])
def test_no_placement_is_cheaper_or_faster_for_its_cost(prices: Sequence[float]) -> None:
    cluster = cluster_of(*zip((1.0, 1.0, 2.0, 4.0), prices))
    score, options = simulator(NET, cluster), PlanOptions(batch=24, num_microbatches=4)
    found, curve = choose(cluster, options, "cost", judged=True)
    points = [(each.best.step_s, each.best.cost or 0.0) for each in curve]
    assert points == sorted(points)
    assert [cost for _, cost in points] == sorted((cost for _, cost in points), reverse=True)
    assert found.best.cost == points[-1][1]
    places = ["0:0", "0:3", "0:0-1", "0:2-3", "0:0-3", *map(".".join, product(("0:0", "0:0-1", "0:2"), ("0:3",)))]
    for place, cut in product(places, "bcd"):
        how = replace(options, placement=place, cut=(cut,) if "." in place else ())
        other = score(fixed_plan(NET, how, cluster))
        hourly = sum(cluster.device(id).price_per_h or 0.0 for id in other.plan.devices)
        cost = hourly / 3600 * 1e6 / other.samples_per_s
        assert any(step_s <= other.median_step_s * 1.02 and least <= cost * 1.02 for step_s, least in points), place


def test_the_fastest_plan_under_a_cost_is_taken_and_the_bound_is_kept() -> None:
    options = PlanOptions(batch=24, **QUICK)
    _, curve = choose(FOUR, options, "cost")
    assert len(curve) > 1
    for each in curve:
        found, _ = choose(FOUR, options, "time-under-cost", (each.best.cost or 0.0) * 1.001)
        assert found.best.plan.placement == each.best.plan.placement
    cheapest = min(each.best.cost or 0.0 for each in curve)
    with pytest.raises(StagewrightError, match=r"the cheapest costs .*\n.*raise --max-cost"):
        choose(FOUR, options, "time-under-cost", cheapest * 0.99)


def test_many_devices_are_planned_for_in_few_sets() -> None:
    large, small = (cluster_of(*[(1.0, 1.0)] * many, rate=1e10).hosts[0] for many in (8, 4))
    wires = tuple(Link(ends=(f"{host}:hub", "net"), kind="NET", bytes_per_s=1e9) for host in range(6))
    wide = Cluster(name="wide", hosts=(large,) * 3 + (small,) * 3, links=wires)
    _, curve = choose(wide, PlanOptions(batch=96, **QUICK), "cost")
    assert curve[0].best.step_s < curve[-1].best.step_s


def test_one_more_device_is_wired_like_the_last_of_its_kind() -> None:
    other, gib = Device(kind="cpu", memory_bytes=2**30), 2**30
    links = (
        Link(ends=("0", "hub"), kind="x", bytes_per_s=1e9), Link(ends=("hub", "1"), kind="x", bytes_per_s=2e9),
        Link(ends=("0", "1"), kind="NV", bytes_per_s=9e9),
    )  # fmt: skip
    fast = Device(kind="TITAN V", memory_bytes=gib, price_per_h=2.0)
    wide = (Link(ends=("0:1", "net"), kind="NET", bytes_per_s=1e8),)
    grown = with_one_more(Cluster(name="c", hosts=(Host(devices=(other, fast), links=links),), links=wide), "titan-v")
    assert grown.hosts[0].devices == (other, fast, fast)
    found = [(link.ends, link.bytes_per_s) for link in grown.hosts[0].links[3:]]
    assert found == [(("hub", "2"), 2e9), (("0", "2"), 9e9)]
    assert grown.links[1].ends == ("0:2", "net")
    assert grown.path(DeviceId(0, 2), DeviceId(0, 0))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return NET.save(tmp_path / "profile.json"), FOUR.save(tmp_path / "four.yaml")


def test_the_curve_is_shown_and_in_the_json(files: tuple[Path, Path]) -> None:
    how = (files[0], "--cluster", files[1], "--batch", 24, *WORDS, "--objective", "cost")
    text = run(plan, *how)
    assert "a million samples cost" in text
    assert text.count("a million samples, ") > 1
    assert "trains a million samples for" in text
    told = json.loads(run(plan, *how, "--json"))
    assert told["best"]["cost"] == min(each["cost"] for each in told["curve"])
    assert told["reason"] == told["plan"]["notes"][0]


def test_what_one_more_device_brings_is_told(files: tuple[Path, Path]) -> None:
    how = (files[0], "--cluster", files[1], "--batch", 24, "--no-simulate", "--one-more")
    told = json.loads(run(plan, *how, "--json"))
    with_it = make_plan(NET, with_one_more(FOUR, "cpu"), PlanOptions(batch=24, **QUICK))
    assert told["one_more"]["cpu"]["step_s"] < told["best"]["step_s"]
    assert told["one_more"]["cpu"]["step_s"] == pytest.approx(with_it.best.step_s, rel=0.1)
    assert "with one more cpu: 1." in run(plan, *how)
    with pytest.raises(StagewrightError, match="--one-more is for devices that may be chosen"):
        run(plan, *how, "--placement", "0:0-1")


def test_times_beyond_what_was_profiled_are_told_as_such(files: tuple[Path, Path]) -> None:
    known = NET.batch_sizes[-1]
    beyond = run(plan, files[0], "--cluster", files[1], "--batch", 4 * 24 * known, "--no-simulate")
    assert f"times the {known} profiled: its times are extrapolated" in " ".join(beyond.split())
    assert "extrapolated" not in run(plan, files[0], "--cluster", files[1], "--batch", min(known, 24), "--no-simulate")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--objective", "time-under-cost"), "--objective time-under-cost needs --max-cost"),
        (("--objective", "cost", "--max-cost", "1"), "--objective cost goes without --max-cost"),
        (("--max-cost", "1"), "--objective time goes without --max-cost"),
        (("--objective", "money"), "expected one of time, cost, time-under-cost|expected 'time', 'cost'"),
    ],
)
def test_a_wrong_wish_says_what_is_wrong(files: tuple[Path, Path], words: tuple[str, ...], error: str) -> None:
    with pytest.raises(StagewrightError, match=error):
        run(plan, files[0], "--cluster", files[1], "--batch", 24, *words)


def test_a_device_without_a_price_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    file = cluster_of((1.0, 1.0), (1.0, None)).save(tmp_path / "some.yaml")
    with pytest.raises(StagewrightError, match=r"priced does not say what 0:1 \(cpu\) costs\n.*price_per_h"):
        run(plan, files[0], "--cluster", file, "--batch", 24, "--objective", "cost")
