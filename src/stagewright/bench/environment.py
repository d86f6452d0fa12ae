"""Where a run ran: hardware, driver, versions, commit, and the variables that change how fast it is."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stagewright.cluster import count
from stagewright.profiling.detect import ask, memory_bytes, num_cores
from stagewright.profiling.topology import without_colours

_Asker = Callable[[Sequence[str]], str | None]
_PACKAGES = ("stagewright", "torch", "numpy")
_VARIABLES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "STAGEWRIGHT_")
"""How the names of variables begin that change how a run computes; others may hold what is nobody's business."""
_IDENTITY = ("host", "cpu", "gpu", "driver", "commit", *_PACKAGES)
"""What makes two sessions one and the same measurement."""


def capture(ask: _Asker = ask, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The facts, by name; those that cannot be known are left out."""
    facts = {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": f"{_cpu_name()}, {count(num_cores(), 'core')} to use, {memory_bytes() / 2**30:.1f} GiB",
        "gpu": _gpus(ask),
        "driver": _first_line(ask(("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))),
        "topology": without_colours(ask(("nvidia-smi", "topo", "-m")) or "").strip(),
        "python": sys.version.split()[0],
        **{name: _installed(name) for name in _PACKAGES},
        "commit": _commit(ask),
        "variables": _variables(environ),
    }
    return {key: value for key, value in facts.items() if value}


def _cpu_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus(ask: _Asker) -> str:
    """`8 × TITAN V, 12066 MiB`, kind by kind."""
    listing = ask(("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")) or ""
    kinds = [line.strip() for line in listing.splitlines() if line.strip()]
    return "; ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


def _installed(name: str) -> str:
    """The version of a package, nothing where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit(ask: _Asker) -> str:
    """The commit of the source that runs, with a word on changes that are in none; nothing outside a checkout."""
    root = str(Path(__file__).parents[3])
    found = _first_line(ask(("git", "-C", root, "rev-parse", "--short=12", "HEAD")))
    changed = ask(("git", "-C", root, "status", "--porcelain", "--untracked-files=no", "--", "src"))
    return f"{found} with changes" if found and changed and changed.strip() else found


def _variables(environ: Mapping[str, str]) -> str:
    """`OMP_NUM_THREADS=1 …`: the variables that matter, sorted."""
    return " ".join(f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith(_VARIABLES))


def _first_line(text: str | None) -> str:
    """The first line of what a command printed, nothing where it failed."""
    lines = (text or "").strip().splitlines()
    return lines[0].strip() if lines else ""


def identity(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts that must be the same for repetitions to be repetitions."""
    return {key: facts[key] for key in _IDENTITY if key in facts}
