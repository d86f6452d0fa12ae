"""What a measured comparison came to: one table, and the sentences under it."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

ALONE, DDP = "single", "torch DDP"
BEGIN, END = "<!-- rehearsal: begin -->", "<!-- rehearsal: end -->"
HEADS = (
    "case", "plan", "predicted images/s", "measured", "spread", "error of the step", "× DDP", "× best peer",
    "of the limit",
)  # fmt: skip

Result = Mapping[str, Any]
"""A case with its entries: name, step_s in each turn, is_chosen; of our plans also predicted_s and is_exact."""


def write_results(results: Sequence[Result], page: Path | None) -> None:
    """Prints the table, and renews its section of a page."""
    made = section(results)
    print(made)
    if page is None:
        return
    text = page.read_text(encoding="utf-8") if page.exists() else "# Results\n"
    before, _, rest = text.partition(BEGIN)
    page.write_text(before.rstrip() + "\n\n" + made + (rest.partition(END)[2] or "\n"), encoding="utf-8")


def section(results: Sequence[Result]) -> str:
    """The section of a results page."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    machine = f"{cpu[1] if cpu else platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    lines += [line for result in results for line in rows(result)]
    return "\n".join([
        BEGIN, "## Rehearsal", "",
        f"Machine: {machine}. Emulated hosts; contenders of a case take turns in the same hosts, medians of their "
        "turns; *spread* is from the shortest to the longest. Bold: the planner's choice. *Of the limit*: against one "
        "process with the same cores.",
        "", "    make rehearsal", "", *lines, "", *sentences(results), END,
    ])  # fmt: skip


def rows(result: Result) -> Iterator[str]:
    """The lines of one case, the fastest first."""
    batch, ddp_s, peer_s = result["batch"], step_of(result, DDP), best_peer(result)
    for entry in sorted(result["entries"], key=step_s):
        step, turns, predicted = step_s(entry), entry["step_s"], entry.get("predicted_s")
        yield "| " + " | ".join((
            result["case"], f"**{entry['name']}**" if entry["is_chosen"] else entry["name"],
            "" if predicted is None else f"{batch / predicted:,.1f}", f"{batch / step:,.1f}",
            percent((max(turns) - min(turns)) / step), "" if predicted is None else percent(predicted / step - 1, "+"),
            "–" if ddp_s is None else f"{ddp_s / step:.2f}", "–" if peer_s is None else f"{peer_s / step:.2f}",
            percent(result["limit_s"] / step),
        )) + " |"  # fmt: skip


def step_s(entry: Mapping[str, Any]) -> float:
    """The median of a contender's turns."""
    return median(entry["step_s"])


def step_of(result: Result, name: str) -> float | None:
    """The step of the contender of a name; None where it did not come through."""
    return next((step_s(entry) for entry in result["entries"] if entry["name"] == name), None)


def best_peer(result: Result) -> float | None:
    """The fastest peer's step; the single process is no peer but the limit."""
    peers = (each for each in result["entries"] if "predicted_s" not in each and each["name"] != ALONE)
    return min(map(step_s, peers), default=None)


def percent(share: float, sign: str = "") -> str:
    """`+7.1 %`, or `104 %` without a sign."""
    text = f"{share:+.1%}" if sign else f"{share:.0%}"
    return text.replace("-", "−").replace("%", " %")


def sentences(results: Sequence[Result]) -> Iterator[str]:
    """What the table comes to."""
    plans = [entry for result in results for entry in result["entries"] if "predicted_s" in entry]
    errors = [abs(entry["predicted_s"] / step_s(entry) - 1) for entry in plans]
    yield f"Predicted steps are {mean(errors):.1%} off on average and {max(errors):.1%} at most ({len(errors)} plans)."
    leads = [lead for result in results for is_exact in (True, False) for lead in leads_of(result, is_exact)]
    yield (
        f"The planner's choice reaches {min(leads):.0%} or more of the best measured plan of its kind in every case, "
        f"and is within 3% of it in {sum(lead >= 0.97 for lead in leads)} of {len(leads)}."
    )
    stands = [(peer_s / step, each["case"]) for each in results for peer_s, step in against_peers(each)]
    if stands:
        yield f"Against the best peer: never below {min(stands)[0]:.2f} ({min(stands)[1]})."
    hung = [each["case"] for each in results if best_peer(each) is None]
    if hung:
        yield f"No peer came through in {', '.join(hung)}: it hung."
    yield f"{sum(result['seconds'] for result in results) / 60:.0f} minutes in all."


def leads_of(result: Result, is_exact: bool) -> Iterator[float]:
    """The best measured plan's step over that of the planner's choice of this kind: 1 is the best itself."""
    own = [entry for entry in result["entries"] if entry.get("is_exact") is is_exact]
    yield from (min(map(step_s, own)) / step_s(entry) for entry in own if entry["is_chosen"])


def against_peers(result: Result) -> Iterator[tuple[float, float]]:
    """The best peer's step and that of the planner's exact choice."""
    peer_s = best_peer(result)
    if peer_s is not None:
        yield from ((peer_s, step_s(each)) for each in result["entries"] if each["is_chosen"] and each.get("is_exact"))
