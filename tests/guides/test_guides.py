"""Tasks that people have, each done from its guide alone: the commands as printed, with the installed wheel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagewright.record import Record
from tests.guides.running import GUIDES, check_printed, commands, follow

pytestmark = pytest.mark.timeout(600)


def loads(folder: Path) -> Record:
    """What a run left."""
    return Record.load(folder / "record.json")


def test_first_run_profile_plan_train_and_report(fresh: Path, tmp_path: Path) -> None:
    said = follow(GUIDES / "first-run.md", fresh, tmp_path)
    assert loads(tmp_path / "results" / "planned").plan.batch == 64
    assert loads(tmp_path / "results" / "larger").plan.batch == 128
    assert "saved results/report.html" in said[-1]
    cases = (tmp_path / "results" / "report.md").read_text(encoding="utf-8")
    assert all(name in cases for name in ("planned", "two-one", "vgg16")), "what was trained and simulated is in it"
    assert (tmp_path / "results" / "report.html").stat().st_size > 10_000


def test_which_plan_and_a_suite_of_ones_own(fresh: Path, tmp_path: Path) -> None:
    said = "\n".join(follow(GUIDES / "which-plan.md", fresh, tmp_path))
    assert "limited by" in said
    assert re.search(r"two-one +● measured", said)
    assert re.search(r"◇ simulated", said)
    assert (tmp_path / "results" / "mine" / "report.html").exists()


def test_which_staleness(fresh: Path, tmp_path: Path) -> None:
    follow(GUIDES / "staleness.md", fresh, tmp_path)
    exact, stale = (loads(tmp_path / "results" / name) for name in ("exact", "stale"))
    assert (exact.plan.versions, stale.plan.versions) == ((1, 1), (2, 1))


def test_unlike_cards(fresh: Path, tmp_path: Path) -> None:
    said = follow(GUIDES / "unlike-cards.md", fresh, tmp_path)
    assert any("limited by compute" in each for each in said)
    first, second = loads(tmp_path / "results" / "two-thirds").plan.stages
    assert len(first.layers) > 0 < len(second.layers)


def test_stop_go_on_and_take_the_model_out(fresh: Path, tmp_path: Path) -> None:
    said = follow(GUIDES / "stop-and-go-on.md", fresh, tmp_path)
    assert re.search("going on after step 20", said[1])
    assert loads(tmp_path / "results" / "long").plan.placement == "0:0-1.0:2"
    assert said[-1] == "loaded 35578 parameters\n"


def test_reading_the_report(fresh: Path, tmp_path: Path) -> None:
    follow(GUIDES / "reading-the-report.md", fresh, tmp_path)
    text = (tmp_path / "results" / "report.md").read_text(encoding="utf-8")
    assert "● measured" in text
    assert "◇ simulated" in text


def test_what_fails_is_told_as_the_guide_tells_it(fresh: Path, tmp_path: Path) -> None:
    page = GUIDES / "when-something-fails.md"
    follow(page, fresh, tmp_path)
    assert re.findall(r"^\*\*(\d+)\.", page.read_text(encoding="utf-8"), re.MULTILINE) == [*map(str, range(1, 11))]


def test_kubernetes_manifest_and_skypilot_task(fresh: Path, tmp_path: Path) -> None:
    follow(GUIDES / "kubernetes.md", fresh, tmp_path)
    assert (tmp_path / "run.yaml").read_text().count("nvidia.com/gpu: ") == 2
    assert "accelerators: H100:3" in (tmp_path / "task.yaml").read_text()


def test_a_figure_that_is_no_more_would_be_seen() -> None:
    shown = "  ▸ 7-1 cut at conv5_1  128.4 ms\n  …\n    data parallel  330.1 ms"
    check_printed(shown, shown.replace("…", "others"))
    with pytest.raises(AssertionError, match="shows what was not printed"):
        check_printed(shown, shown.replace("330.1", "330.2"))


@pytest.mark.parametrize("page", sorted(GUIDES.glob("*.md")), ids=lambda page: page.name)
def test_a_guide_is_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 190
    assert commands(page) or "```python" in text, "a guide has something to do"
