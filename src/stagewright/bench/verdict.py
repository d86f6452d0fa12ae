"""What a measured comparison came to: one table, and the sentences under it."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field

from stagewright.bench.contest import ALONE
from stagewright.bench.rounds import known_to, slope, times_as_long
from stagewright.errors import RecordError, StagewrightError
from stagewright.noun import Saved, noun
from stagewright.profile import Kernels

DDP = "torch DDP"
NEAR = 0.03
"""How close to the best plan the planner's choice should be."""
BEGIN, END = "<!-- rehearsal: begin -->", "<!-- rehearsal: end -->"


@noun(error=RecordError)
class Entry:
    """One contender of a case."""

    name: str
    step_s: tuple[float, ...] = Field(min_length=1)
    predicted_s: float | None = None
    """For the speed of the profile; None for peers, which are not predicted."""
    even_s: tuple[float, ...] = ()
    """Its steps, had the machine been as fast as for the profile in every turn; none for peers."""
    is_chosen: bool = False
    """Whether it is the planner's own plan."""
    is_exact: bool = True
    is_continued: bool = False
    """Whether each of its turns goes on where the one before ended."""

    @property
    def is_ours(self) -> bool:
        """Whether it is one of our plans."""
        return self.predicted_s is not None

    @property
    def median_s(self) -> float:
        """The median of its rounds, or of runs of them where they go on."""
        return slope(self.step_s) if self.is_continued else median(self.step_s)

    @property
    def even_median_s(self) -> float:
        """The same at the speed of the profile."""
        return slope(self.even_s) if self.is_continued else median(self.even_s)

    @property
    def error(self) -> float | None:
        """The prediction against the measurement, both at the speed of the profile, as a share of it."""
        return None if self.predicted_s is None else self.predicted_s / self.even_median_s - 1

    def against(self, other: Entry) -> float:
        """How many times as long as another's a step is, round by round unless rounds go on."""
        if self.is_continued and other.is_continued:
            return self.median_s / other.median_s
        return times_as_long(self.step_s, other.step_s)


class Lead(NamedTuple):
    """Where the planner's choice stands to the best measured plan: 1 is the best itself."""

    share: float
    known_to: float
    """The standard error of the share."""

    @property
    def is_near(self) -> bool:
        """Whether the choice is within 3 % of the best."""
        return self.share >= 1 - NEAR

    @property
    def may_be_near(self) -> bool:
        """Whether it may be, for all that the rounds can tell."""
        return self.share + 2 * self.known_to >= 1 - NEAR


@noun(error=RecordError)
class CaseResult(Saved):
    """All contenders of a case."""

    FORMAT: ClassVar[str] = "stagewright.rehearsed"
    ERROR: ClassVar[type[StagewrightError]] = RecordError

    case: str
    batch: int = Field(ge=1)
    rounds: int = Field(ge=1)
    seconds: float = Field(ge=0)
    core_share: float = Field(default=1.0, gt=0)
    """The cores of the hosts together, against those of the single process."""
    kernels: Kernels = "onednn"
    """What everyone computed with on CPUs."""
    slowest: float = Field(default=1.0, gt=0)
    """How many times as long as for the profile the machine took, at most, in a turn of a plan."""
    fastest: float = Field(default=1.0, gt=0)
    """The same, at least."""
    entries: tuple[Entry, ...] = Field(min_length=1)

    def named(self, name: str) -> Entry:
        """The contender of a name."""
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def limit_s(self) -> float:
        """What the hosts' cores take for a step when nothing is sent: the single process, scaled to them."""
        return self.named(ALONE).median_s / self.core_share

    @property
    def peer_s(self) -> float | None:
        """The fastest peer's step, None where none came through; the single process is no peer but the limit."""
        return min(
            (entry.median_s for entry in self.entries if not entry.is_ours and entry.name != ALONE), default=None
        )

    @property
    def ddp_s(self) -> float | None:
        """DDP's step, None where it did not come through."""
        return next((entry.median_s for entry in self.entries if entry.name == DDP), None)

    def lead(self, is_exact: bool) -> Lead | None:
        """The planner's choice against the best measured plan of its kind."""
        own = [entry for entry in self.entries if entry.is_ours and entry.is_exact == is_exact]
        chosen = next((entry for entry in own if entry.is_chosen), None)
        if chosen is None:
            return None
        best = min(own, key=lambda entry: entry.against(chosen))
        return Lead(best.against(chosen), 0.0 if best is chosen else known_to(best.step_s, chosen.step_s))


def rows(result: CaseResult) -> Iterator[str]:
    """The lines of one case, the fastest first."""
    for entry in sorted(result.entries, key=lambda entry: entry.median_s):
        step = entry.median_s
        predicted = f"{result.batch / entry.predicted_s:,.1f}" if entry.predicted_s is not None else ""
        even = f"{result.batch / entry.even_median_s:,.1f}" if entry.is_ours else ""
        error = "" if entry.error is None else f"{entry.error:+.1%}".replace("-", "−").replace("%", " %")
        name = f"**{entry.name}**" if entry.is_chosen else entry.name
        cells = (
            result.case, name, predicted, even, error, f"{result.batch / step:,.1f}", against(result.ddp_s, step),
            against(result.peer_s, step), f"{result.limit_s / step:.0%}".replace("%", " %"),
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def against(other_s: float | None, step_s: float) -> str:
    """Another's step over one, or a dash where the other hung."""
    return "–" if other_s is None else f"{other_s / step_s:.2f}"


def table(results: Sequence[CaseResult]) -> str:
    """One table over all cases, and what it shows."""
    heads = (
        "case",
        "plan",
        "predicted images/s",
        "measured at the profile's speed",
        "error of the step",
        "measured",
        "× DDP",
        "× best peer",
        "of the limit",
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [line for result in results for line in rows(result)]
    return "\n".join([*lines, "", *sentences(results)])


def sentences(results: Sequence[CaseResult]) -> Iterator[str]:
    """What the table comes to."""
    errors = [abs(entry.error) for result in results for entry in result.entries if entry.error is not None]
    yield f"Predicted steps are {mean(errors):.1%} off on average and {max(errors):.1%} at most ({len(errors)} plans)."
    leads = [lead for result in results for exact in (True, False) if (lead := result.lead(exact)) is not None]
    near, maybe = sum(lead.is_near for lead in leads), sum(lead.may_be_near for lead in leads)
    yield (
        f"The planner's choice reaches {min(lead.share for lead in leads):.0%} or more of the best measured plan of "
        f"its kind in every case; it is within {NEAR:.0%} of it in {near} of {len(leads)}, and may be for all that the "
        f"rounds can tell (two standard errors) in {maybe}."
    )
    stands = [(stand, each.case) for each in results if (stand := best_against_peers(each)) is not None]
    if stands:
        yield f"Against the best peer: never below {min(stands)[0]:.2f} ({min(stands)[1]})."
    yield from (f"No peer came through in {each.case}: it hung." for each in results if each.peer_s is None)
    plain = [each.case for each in results if each.kernels == "plain"]
    if plain:
        yield (f"Everyone computed with plain kernels, which take less time here than oneDNN's, in {', '.join(plain)}.")
    slowest, fastest = max(each.slowest for each in results), min(each.fastest for each in results)
    if slowest > fastest:
        yield (
            f"In the turns of plans the machine took {fastest:.2f} to {slowest:.2f} times as long as for the profile, "
            "by its pulse and by passes; predictions are compared with steps at the profile's speed."
        )
    yield f"{sum(result.seconds for result in results) / 60:.0f} minutes in all."


def best_against_peers(result: CaseResult) -> float | None:
    """How the planner's exact choice stands to the fastest peer."""
    chosen = [entry.median_s for entry in result.entries if entry.is_chosen and entry.is_exact]
    return None if result.peer_s is None else result.peer_s / min(chosen)


def section(results: Sequence[CaseResult], command: str) -> str:
    """The section of a results page."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    machine = f"{cpu[1] if cpu else platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    rounds = min(result.rounds for result in results)
    continued = (
        " Turns without a flush go on where the last one ended: the median is that of the means of turns in a row."
        if any(entry.is_continued for result in results for entry in result.entries)
        else ""
    )
    return "\n".join([
        BEGIN, "## Rehearsal", "",
        f"Machine: {machine}. Emulated hosts; contenders of a case take turns in the same hosts, medians of "
        f"{rounds} rounds, or of more where plans stay close to the planner's choice.{continued} Bold: the planner's "
        "choice. *Of the limit*: against one process with the same cores.",
        "", f"    {command}", "", table(results), END,
    ])  # fmt: skip


def write_results(results: Sequence[CaseResult], page: Path | None) -> None:
    """Prints the table, and renews its section of a page."""
    made = section(results, "make rehearsal")
    print(made)
    if page is None:
        return
    text = page.read_text(encoding="utf-8") if page.exists() else "# Results\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if rest else ""
    page.write_text(before.rstrip() + "\n\n" + made + (after or "\n"), encoding="utf-8")
