"""Damaged inputs: texts and files that were good once, cut, doubled, spliced and blown up; and what becomes of them."""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from stagewright.bench.suite import SuiteFile, make_suite
from stagewright.cluster import Cluster, Device, make_cluster, parse_devices, parse_placement, parse_ratio
from stagewright.errors import StagewrightError
from stagewright.plan import Plan, Stage, parse_staleness
from stagewright.planning.fixed import LayerTable, fixed_plan
from stagewright.planning.options import PlanOptions
from stagewright.profile import LayerProfile, Profile
from stagewright.profiling.detect import read_topology
from stagewright.record import Point, Record, Span
from stagewright.schedule import Schedule
from stagewright.scheduling import make_schedule
from stagewright.schema import parse_plain
from stagewright.training.recipes import RecipeFile

DEVICE = Device(kind="card", memory_bytes=1 << 34)
LONGEST_S, MOST_BYTES = 1.0, 1 << 30
SPLICES = (
    "0", "-1", "1e999", "nan", "9" * 40, "1-999999999", "0:0-99999", "\x00", "\ud7ff", "é", "\n", "  ", ":", ".", ",",
    "-", "[", "]", "{", "}", '"', "&a [*a]", "!!python/object/apply:os.system ['true']", "<<: *a", "null", "true",
    "[" * 200, "{a: " * 60,
    "../../etc/passwd", "0x7fffffffffffffff", "1_000", "~",
)  # fmt: skip
TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV1\tPHB\tSYS\t0-19
GPU1\tNV1\t X \tPHB\tSYS\t0-19
GPU2\tPHB\tPHB\t X \tPIX\t20-39
GPU3\tSYS\tSYS\tPIX\t X \t20-39
"""


@dataclass
class Kind:
    """One kind of input: good examples, and what reads it."""

    name: str
    good: list[str]
    read: Callable[[str], object]


@dataclass
class Outcome:
    """What became of the inputs of one kind."""

    tried: int = 0
    valid: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    """Inputs that were neither refused with a word nor valid."""


def kinds() -> list[Kind]:
    """Everything that a person can hand in."""
    plan = Plan(
        model="m", batch=24, num_microbatches=4,
        stages=(
            Stage(layers=("a", "b"), devices=parse_devices("0:0-2"), versions=2),
            Stage(layers=("c",), devices=parse_devices("0:3")),
        ),
    )  # fmt: skip
    record = Record(
        name="r", source="measured", plan=plan, cluster="local", precision="fp32", step_s=(0.1, 0.2), step_samples=24,
        spans=(Span(0, "F", 0, 0, 0, 0.0, 0.1, -1),),
        points=(Point(name="loss", step=1, epoch=0.0, value=1.0, seconds=0.1),),
    )  # fmt: skip
    clusters = [path.read_text() for path in sorted(Path("clusters").glob("*.yaml"))]
    recipes = [path.read_text() for path in sorted(Path("recipes").glob("*.yaml"))]
    return [
        Kind("placement", ["0:0-6.0:7", "0:0-7,1:0-7.0:0-7,1:0-7", "0:0", "0:0-4.0:5-6.0:7"], parse_placement),
        Kind("ratio", ["11:7", "1:1:2", "0.5:3.25"], parse_ratio),
        Kind("staleness", ["ssp", "2bw", "3,2,1", "0"], lambda text: parse_staleness(text, 3)),
        Kind("plan options", ["0:0-2.0:3 11:7", "0:0.0:1 1:1"], options_of),
        Kind("topology", [TOPOLOGY], lambda text: read_topology([text], DEVICE)),
        Kind("cluster file", clusters, file_reader(Cluster)),
        Kind("plan file", [text_of(plan), yaml_of(plan)], file_reader(Plan)),
        Kind("schedule file", [text_of(make_schedule(plan))], file_reader(Schedule)),
        Kind("record file", [text_of(record), yaml_of(record)], file_reader(Record)),
        Kind("profile file", [profile_text()], file_reader(Profile)),
        Kind("recipe file", recipes, file_reader(RecipeFile)),
        Kind("suite file", [path.read_text() for path in SuiteFile.ready_made().values()], suite_of),
    ]  # fmt: skip


def suite_of(text: str) -> object:
    """A suite with its matrices and inheritance written out."""
    return make_suite(parse_plain(text, is_yaml=not text.startswith("{"), where="input"), where="input")


def profile_text() -> str:
    """A profile as a file."""
    names = ("a", "b", "c")
    layers = tuple(
        LayerProfile(name=name, forward_s=(0.1,), backward_s=(0.2,), parameter_bytes=8, output_bytes=4, saved_bytes=4)
        for name in names
    )
    return text_of(Profile(model="m", device="cpu", source="measured", batch_sizes=(8,), layers=layers))


def options_of(text: str) -> object:
    """A plan from a placement and a ratio, as `stagewright train` makes it."""
    placement, _, ratio = text.partition(" ")
    table = LayerTable(model="m", names=tuple("abcdef"), flops=(1,) * 6, parameter_bytes=(4,) * 6)
    return fixed_plan(table, PlanOptions(batch=24, placement=placement, ratio=ratio or None), make_cluster(8))


def text_of(noun) -> str:
    """A noun as JSON."""
    return json.dumps(noun.to_dict())


def yaml_of(noun) -> str:
    """A noun as YAML."""
    return yaml.safe_dump(noun.to_dict(), sort_keys=False)


def file_reader(noun) -> Callable[[str], object]:
    """What reads a file of a noun, JSON or YAML."""
    return lambda text: noun.from_dict(
        parse_plain(text, is_yaml=not text.startswith("{"), where="input"), where="input"
    )


def mutated(text: str, other: str, draw: random.Random) -> str:
    """The text after one to four kinds of damage."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        text = draw.choice(DAMAGES)(text, other, draw)
    return text


def _cut(text: str, other: str, draw: random.Random) -> str:
    first = draw.randrange(len(text) + 1)
    return text[:first] + text[first + draw.choice((1, 3, 20, len(text))) :]


def _double(text: str, other: str, draw: random.Random) -> str:
    first = draw.randrange(len(text) + 1)
    piece = text[first : first + draw.choice((1, 5, 80))]
    return text[:first] + piece * draw.choice((2, 3, 50)) + text[first:]


def _splice(text: str, other: str, draw: random.Random) -> str:
    first = draw.randrange(len(text) + 1)
    return text[:first] + draw.choice(SPLICES) + text[first + draw.choice((0, 0, 1, 5)) :]


def _flip(text: str, other: str, draw: random.Random) -> str:
    if not text:
        return text
    first = draw.randrange(len(text))
    return text[:first] + chr(ord(text[first]) ^ 1 << draw.randrange(7)) + text[first + 1 :]


def _cross(text: str, other: str, draw: random.Random) -> str:
    return text[: draw.randrange(len(text) + 1)] + other[draw.randrange(len(other) + 1) :]


def _swap_lines(text: str, other: str, draw: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    first, second = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return "".join(lines)


def _number(text: str, other: str, draw: random.Random) -> str:
    """One of the numbers in the text becomes another."""
    places = [place for place, letter in enumerate(text) if letter.isdigit()]
    if not places:
        return text
    place = draw.choice(places)
    return text[:place] + draw.choice(("0", "-1", "1.5", "99999999", "1e300", str(1 << 70))) + text[place + 1 :]


DAMAGES = (_cut, _double, _splice, _flip, _cross, _swap_lines, _number)


def try_inputs(number: int, seed: int) -> Iterator[tuple[str, Outcome]]:
    """Damages inputs of all kinds in turn, so many in all, and tells what became of them, kind by kind."""
    draw, known = random.Random(seed), kinds()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, limit[1]))
    try:
        for place, kind in enumerate(known):
            share = number // len(known) + (place < number % len(known))
            yield kind.name, try_kind(kind, share, draw)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


def try_kind(kind: Kind, number: int, draw: random.Random) -> Outcome:
    """Damages inputs of one kind."""
    found = Outcome()
    for _ in range(number):
        text = mutated(draw.choice(kind.good), draw.choice(kind.good), draw)
        started = time.process_time()  # other processes' time on a busy machine is not the input's
        try:
            kind.read(text)
            found.valid += 1
        except StagewrightError as fault:
            found.refused += 1
            if not fault.what.strip():
                found.faults.append(f"no word: {text[:200]!r}")
        except BaseException as fault:
            found.faults.append(f"{type(fault).__name__}: {fault}: {text[:300]!r}"[:600])
        took = time.process_time() - started
        found.tried, found.slowest_s = found.tried + 1, max(found.slowest_s, took)
        if took > LONGEST_S:
            found.faults.append(f"{took:.1f} s: {text[:200]!r}")
    return found
