"""Imports go downward over the floors of docs/flow.md, rooms on one floor stay apart, and torch stays in its rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import stagewright

PACKAGE = Path(stagewright.__file__).parent

FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("bench",),
    ("training", "rehearsal"),
    ("runtime", "simulation", "report"),
    ("planning", "scheduling", "profiling"),
    ("models", "data"),
    ("record",),
    ("schedule", "cost"),
    ("memory",),
    ("policy",),
    ("plan", "network"),
    ("profile", "cluster", "system"),
    ("schema",),
    ("errors",),
)
"""From the top down; the last eight are the nouns and what they stand on."""

TORCH_ROOMS = {"models", "profiling", "runtime", "data", "training", "bench", "rehearsal"}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SOURCES = sorted(PACKAGE.rglob("*.py"))


class Import(NamedTuple):
    """One import of a module, by whom, and whether it happens when the importer is imported."""

    file: Path
    line: int
    module: str
    at_once: bool


def imports_of(file: Path) -> Iterator[Import]:
    """Every import in a file but those for the type checker alone."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {id(node) for block in ast.walk(tree) if is_typing_block(block) for node in ast.walk(block)}
    inside = {id(node) for scope in ast.walk(tree) if isinstance(scope, FUNCTIONS) for node in ast.walk(scope)}
    for node in ast.walk(tree):
        if id(node) not in typing_only:
            for module in modules_in(node):
                yield Import(file, getattr(node, "lineno", 0), module, id(node) not in inside)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_typing_block(node: ast.AST) -> bool:
    """True for `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def modules_in(node: ast.AST) -> list[str]:
    """The modules that a statement imports; `from stagewright import plan` imports `stagewright.plan`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"line {node.lineno} imports by dots: write the whole name"
    assert node.module is not None
    return [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "stagewright" else [node.module]


def room_of(file: Path) -> str:
    """The folder or noun that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def room_called(module: str) -> str | None:
    """The folder or noun of a module of this package; None for modules of others."""
    parts = module.split(".")
    return parts[1] if parts[0] == "stagewright" and len(parts) > 1 else None


def faults(found: Import) -> Iterator[str]:
    """What is wrong with an import."""
    here, there = room_of(found.file), room_called(found.module)
    where = f"{found.file.relative_to(PACKAGE)}:{found.line}"
    if here == "__init__":
        return
    if there is not None and there != here:
        if there not in FLOOR_OF:
            yield f"{where} imports {found.module}, which stands on no floor"
        elif FLOOR_OF[there] <= FLOOR_OF[here]:
            level = "on its own floor" if FLOOR_OF[there] == FLOOR_OF[here] else "above it"
            yield f"{where}: {here} imports {there}, {level}"
    needs_torch = found.module.split(".")[0] in ("torch", "torchvision")
    if needs_torch and here not in TORCH_ROOMS:
        yield f"{where}: {here} imports torch: only {', '.join(sorted(TORCH_ROOMS))} may"
    is_quick = here == "cli" and found.file.stem in QUICK_VERBS
    if is_quick and found.at_once and there in TORCH_ROOMS:
        yield f"{where}: `stagewright {found.file.stem}` imports {found.module} at once: import it in the function"


QUICK_VERBS = {"__init__", "models", "schedule", "report"}
"""Their help and their work need no torch."""


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(file) for file in SOURCES} - {"__init__"}
    assert rooms <= FLOOR_OF.keys(), f"no floor for {rooms - FLOOR_OF.keys()}: name it in FLOORS and in docs/flow.md"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_downward(file: Path) -> None:
    found = [fault for one in imports_of(file) for fault in faults(one)]
    assert not found, "\n".join(found)


def test_an_upward_import_would_be_seen(tmp_path: Path) -> None:
    """The check itself: from a simulation, upward, sideways, torch and a dotted import are refused, downward is not."""
    wrong = (
        "import torch",
        "from stagewright.cli import main",
        "from stagewright import report",
        "import stagewright.runtime.world",
    )
    right = ("from stagewright.plan import Plan", "from stagewright.planning import fixed_plan", "import numpy")
    file = PACKAGE / "simulation" / "imagined.py"
    for text in (*wrong, *right):
        found = [Import(file, 1, module, True) for module in modules_in(ast.parse(text).body[0])]
        assert bool([fault for one in found for fault in faults(one)]) == (text in wrong), text


WITHOUT_TORCH = (
    "import stagewright",
    "import stagewright.cli",
    "import stagewright.planning, stagewright.scheduling, stagewright.simulation, stagewright.report",
    "import stagewright as sw; sw.Cluster, sw.Profile, sw.Plan, sw.Schedule, sw.Record, sw.make_schedule, sw.simulate",
)


@pytest.mark.parametrize("statement", WITHOUT_TORCH)
def test_planning_and_simulating_start_without_torch(statement: str) -> None:
    check = f"import sys; {statement}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


ALL_THAT_IS_SHARED = """
import os, signal, sys, threading, warnings
def seen():
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    open_files = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else 0
    return (dict(os.environ), os.getcwd(), list(sys.path), sys.excepthook, sys.getswitchinterval(), handlers,
            threading.active_count(), list(warnings.filters), open_files, cores)
before = seen()
import stagewright
import stagewright.cli
for one, other in zip(before, seen()):
    assert one == other, (one, other)
"""


def test_importing_changes_nothing_outside_itself() -> None:
    """Not the environment, signals, warnings, paths, files or threads of whoever imports it."""
    subprocess.run([sys.executable, "-c", ALL_THAT_IS_SHARED], check=True, timeout=60)


def import_seconds(statement: str) -> float:
    """The processor's seconds that an import took, the best of three processes: what others do does not count."""
    check = (
        f"import sys, time; before = time.process_time(); {statement}; print(time.process_time() - before)\n"
        "assert 'torch' not in sys.modules"
    )

    def once() -> float:
        return float(subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True).stdout)

    return min(once() for _ in range(3))


def test_importing_takes_less_than_300_ms() -> None:
    bare = import_seconds("import stagewright")
    nouns = import_seconds("import stagewright.record")
    print(f"import stagewright: {bare * 1e3:.0f} ms; with the nouns, so with pydantic: {nouns * 1e3:.0f} ms")
    assert bare < 0.3


def test_what_the_package_offers_is_there() -> None:
    for name in stagewright.__all__:
        assert getattr(stagewright, name) is not None
    assert sorted(stagewright.__all__) == sorted(stagewright._homes())
    assert set(stagewright.__all__) <= set(dir(stagewright))
    with pytest.raises(AttributeError, match="no attribute 'make_coffee'"):
        _ = stagewright.make_coffee


LONGEST_FUNCTION, LONGEST_FILE = 40, 500


def test_report_on_size() -> None:
    """Long functions and files are told, not refused: a good reason beats a number."""
    for file in SOURCES:
        text = file.read_text(encoding="utf-8")
        name = file.relative_to(PACKAGE)
        if text.count("\n") > LONGEST_FILE:
            print(f"{name} has {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            length = (node.end_lineno or 0) - node.lineno + 1 if isinstance(node, FUNCTIONS) else 0
            if length > LONGEST_FUNCTION:
                print(f"{name}:{getattr(node, 'lineno', 0)} {getattr(node, 'name', 'lambda')} has {length} lines")
