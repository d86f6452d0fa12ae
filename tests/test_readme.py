"""The README's commands and its Python work as they are printed, in the order in which they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("stagewright ")]
PRINTED = {
    before.splitlines()[-1]: shown
    for before, shown in re.findall(r"^```bash\n([^`]*)^```\n\n^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
}
"""What the README prints of a command: the last one of the block before."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment in which the wheel is installed, and of this one only what it depends on."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], ROOT)
    (wheel,) = folder.glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    # Lines of a .pth file that is read by way of another one's are not read: an editable install is left behind.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    python = folder / "venv" / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], folder)
    where = run([python, "-c", "import stagewright; print(stagewright.__file__)"], folder)
    assert Path(where.strip()).is_relative_to(site)
    return python.parent


def run(words: Sequence[str | Path], where: Path) -> str:
    """What a command prints; it must end well, and finds nothing of this project by way of the environment."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if words[0] == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(400)
def test_the_tour_works_with_the_wheel_and_prints_what_is_printed_here(fresh: Path, tmp_path: Path) -> None:
    assert len(COMMANDS) >= 6
    assert sorted(command.split()[1] for command in PRINTED) == ["plan", "schedule"]
    for command in COMMANDS:
        program, *words = shlex.split(command)
        check_printed(PRINTED.get(command, ""), run([fresh / program, *words], tmp_path))
    assert (tmp_path / "results" / "report.html").stat().st_size > 10_000
    cases = (tmp_path / "results" / "report.md").read_text(encoding="utf-8")
    assert all(name in cases for name in ("tiny", "long", "alexnet")), "what was trained is in the report too"


def check_printed(shown: str, printed: str) -> None:
    """Every line that the README shows was printed, in this order and to the last digit; `…` stands for others."""
    lines = iter(line.rstrip() for line in printed.splitlines())
    for line in shown.splitlines():
        assert line.strip() == "…" or line in lines, f"the README shows what was not printed here:\n{line}\n{printed}"


def test_a_figure_of_the_readme_that_is_no_more_would_be_seen() -> None:
    (shown,) = (text for command, text in PRINTED.items() if " plan " in command)
    check_printed(shown, shown)
    with pytest.raises(AssertionError, match="shows what was not printed"):
        check_printed(shown, shown.replace(" ms", "1 ms", 1))


def test_the_python_works(tmp_path: Path) -> None:
    block, _ = blocks("python")
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"0:0-2\.0:3: [\d,]+ images/s predicted", done.stdout)


def test_the_example_is_the_one_in_the_file_which_its_own_test_runs() -> None:
    assert blocks("python")[1] == (ROOT / "examples" / "own_model.py").read_text(encoding="utf-8")


def test_make_targets_that_are_named_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for line in re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
            assert line in targets


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
