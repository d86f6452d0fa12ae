"""The documents: what they link to and show is there, their Python runs, and the site of them builds without a word."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import stagewright
from tests.guides.running import ROOT, blocks, follow, run

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
pytestmark = pytest.mark.timeout(400)


def test_the_readme_fits_a_screen_and_its_commands_work(fresh: Path, tmp_path: Path) -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 66
    follow(ROOT / "README.md", fresh, tmp_path)
    assert (tmp_path / "results" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(<?([^)#:>]*)(?:#([^)]*))?>?\)", text):
        there = (page.parent / target) if target else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}#{anchor}, which is not there"


def anchors(page: Path) -> list[str]:
    """The places of a page that a link can name: its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_whole(page: Path) -> None:
    """Every fence is closed, shell commands can be parsed, and Python compiles."""
    assert page.read_text(encoding="utf-8").count("\n```") % 2 == 0
    for language, text in blocks(page):
        if language == "bash":
            subprocess.run(["bash", "-n", "-c", text], check=True)
        if language == "python" and page.name != "extending.md":  # where a block is a part of a file
            compile(text, str(page), "exec")


def test_the_reference_has_every_name_and_its_python_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "api.md"
    named = re.findall(r"^::: stagewright\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(stagewright.__all__)
    ((_, text),) = blocks(page)
    said = run([sys.executable, "-c", text], tmp_path, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert re.search(r"0:0-2\.0:3: [\d,]+ images/s predicted", said)


def test_make_targets_that_are_named_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        for line in re.findall(r"^make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert line in targets


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="pip install stagewright[docs]")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    own = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    said = run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path], ROOT, own)
    assert said.strip() == ""
    assert "search" in (tmp_path / "guides" / "first-run.html").read_text(encoding="utf-8")
    assert "make_profile" in (tmp_path / "api.html").read_text(encoding="utf-8")


def test_the_source_release_makes_the_same_wheel(fresh: Path, tmp_path: Path) -> None:
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], ROOT, own)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], unpacked, own)
    files = [zipfile.ZipFile(next(folder.glob("*.whl"))).namelist() for folder in (tmp_path, fresh.parents[1])]
    assert sorted(files[0]) == sorted(files[1])
    assert (unpacked / "CITATION.cff").exists()


def test_one_version_is_named_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_image_copies_what_there_is() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
