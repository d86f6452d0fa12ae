"""Guides, done as they are printed: every block in its order, in a fresh folder, with the installed wheel.

```bash       commands, which end well
```console    commands behind `$ `, and what each prints; `…` stands for anything
```python     a script of the reader's; ```yaml a file, named in its first line
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
LIMIT_S = 200
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and text of every fenced block of a page, in their order."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def environment(bin: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """What a reader's shell has: the environment's programs, and nothing of this project."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{bin}:{own['PATH']}"
    return {**own, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PATH": path, **variables}


def run(
    words: Sequence[object], where: Path, own: Mapping[str, str] | None = None, status: int = 0,
    enter: Callable[[], None] | None = None,
) -> str:  # fmt: skip
    """What a command prints; it must end with that status, in time. `enter` moves it first."""
    done = subprocess.Popen(
        [*map(str, words)], cwd=where, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, start_new_session=True, preexec_fn=enter,
    )  # fmt: skip
    try:
        said = done.communicate(timeout=LIMIT_S)[0]
    except BaseException:
        os.killpg(done.pid, signal.SIGKILL)
        done.communicate(timeout=10)
        raise
    assert done.returncode == status, f"{words}\n{said}"
    return said


def follow(
    page: Path, bin: Path, where: Path, *, enter: Callable[[], None] | None = None, **variables: str
) -> list[str]:
    """Does what a page says; what each of its commands printed."""
    own, said = environment(bin, variables), []
    for language, text in blocks(page):
        if language == "bash":
            lines = text.replace("\\\n", " ").splitlines()
            said += [run(["bash", "-euo", "pipefail", "-c", line], where, own, enter=enter) for line in lines]
        elif language == "console":
            for line, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
                told = re.search("^error: (worker )?", shown, re.MULTILINE)
                status = 0 if told is None else 3 if told[1] else 2  # a run that failed, or what was typed
                said.append(run(["bash", "-c", line], where, own, status))
                check_printed(shown, said[-1])
        elif language == "python":
            (where / "script.py").write_text(text)
            said.append(run([bin / "python", "script.py"], where, own))
        elif language == "yaml":
            (where / text.split()[1]).write_text(text)
        else:
            assert language == "text", f"{page.name}: a block of {language}, which nobody runs"
    return said


def commands(page: Path) -> list[str]:
    """The lines of a page that a reader types."""
    typed = [line for language, text in blocks(page) if language == "bash" for line in text.splitlines()]
    shown = [text for language, text in blocks(page) if language == "console"]
    return typed + [line[2:] for text in shown for line in text.splitlines() if line.startswith("$ ")]


def check_printed(shown: str, printed: str) -> None:
    """Every line that a page shows was printed, in this order; `…` stands for other lines, or for a part of one."""
    lines = iter(line.strip() for line in printed.splitlines())
    for line in shown.splitlines():
        wanted = re.compile(".*".join(map(re.escape, line.strip().split("…"))))
        seen = line.strip() in ("…", "") or any(wanted.fullmatch(each) for each in lines)
        assert seen, f"the page shows what was not printed here:\n{line}\n{printed}"


def make_environment(folder: Path) -> Path:
    """The programs of a new environment in which the wheel is installed, and of this one only what it depends on."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], ROOT, own)
    (wheel,) = folder.glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder, own)
    # Lines of a .pth file that is read by way of another one's are not read: an editable install is left behind.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    python = folder / "venv" / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], folder, own)
    (python.parent / "torchrun").write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
    (python.parent / "torchrun").chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = run([python, "-c", "import stagewright; print(stagewright.__file__)"], folder, clean)
    assert Path(where.strip()).is_relative_to(site)
    return python.parent
