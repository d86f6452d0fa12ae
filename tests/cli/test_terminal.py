"""What every verb prints on terminals of 80, 100 and 140 columns: all of it, and no line too wide."""

from __future__ import annotations

import re
import sys

import pytest

from stagewright.cli import VERBS
from tests.terminal import lines_of, typed

LINES = """
models
models vgg16 --layers
cluster titan-v-8
cluster hosts-4
profile vgg16 --device titan-v --batch 8,16 -o vgg16.profile.json
plan vgg16.profile.json --cluster titan-v-8 --batch 224 --staleness ssp -o plan.json
schedule --replicas 3,1 --microbatches 6 --route rotate
schedule --replicas 2,2,2,2 --microbatches 32 --schedule 1f1b
simulate plan.json --profile vgg16.profile.json --cluster titan-v-8 -o results/ssp.record.json
simulate vgg16 --cluster titan-v-8 --batch 64 --devices 1,2,4,8
simulate vgg16 --cluster titan-v-8 --batch 256 -o results/dp.record.json
bench pipedream --list
bench resnet50-amp --simulate --only *-1-* -o bench
bench compare bench bench
data make shapes --images 20
data inspect shapes
train tiny-cnn --batch 8 --device cpu --dry-run --placement 0:0-2.0:3
rehearse tiny-cnn --batch 8 --cluster hosts-4 --print-config
train tiny-cnn --batch 8 --device cpu --devices 1 --steps 3 --seed 1 -o runs/one
export runs/one -o runs/one.safetensors
checkpoints verify runs/one
doctor runs/one
launch --help
report results --cluster titan-v-8 -o page
modells
train --help
train --help-all
plan vgg16 --cluster titan-v-8 --batch 8 --staleness spp
""".strip().splitlines()
MARK = "════"
ALL = f"""
import sys
from stagewright.cli import main
for line in {LINES!r}:
    print("{MARK}", line, flush=True)
    try: main(line.split())
    except SystemExit: pass
"""
PASSING = re.compile(
    r"^.*(steps  |starting |images/s (in|·)|\d/\d+$|loss .*→).*$|^ *left$|\S*[━█─╭╮╰╯│]\S*|"
    r"\d+ more options.*|saved in .*",
    re.MULTILINE,
)
SEARCHED = re.compile(r"weighed\s[^.]*\sin\s+[\d.]+\s+s\b|about\s+\d+\s+s\s+left")
"""Bars, which are as long as there is room, and figures of this very moment."""


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[str]]]:
    """By width and command the lines on the screen."""
    found: dict[int, dict[str, list[str]]] = {}
    for columns in (80, 100, 140):
        folder = tmp_path_factory.mktemp(f"w{columns}")
        status, written = typed(sys.executable, "-c", ALL, columns=columns, folder=folder, seconds=280)
        assert status == 0, written[-3000:]
        blocks = written.split(MARK)[1:]
        found[columns] = {line: lines_of(block)[1:] for line, block in zip(LINES, blocks, strict=True)}
    return found


def test_every_verb_is_looked_at() -> None:
    assert {line.split()[0] for line in LINES} - {"modells"} == set(VERBS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("line", LINES)
def test_nothing_is_cut_off(line: str, screens: dict[int, dict[str, list[str]]]) -> None:
    shown = {}
    for columns, screen in screens.items():
        assert screen[line]
        assert max(map(len, screen[line])) <= columns
        shown[columns] = set(SEARCHED.sub("", PASSING.sub("", "\n".join(screen[line]))).split())
    assert shown[80] == shown[100] == shown[140]
