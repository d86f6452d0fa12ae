"""Our runtime against an earlier version of itself, step by step in turns.

    git archive REVISION src benchmarks | tar -x -C OLD && python benchmarks/against.py OLD

Both versions have their workers at once and take one step after the other, so that a machine that is slow for a while
is slow for both. The cases are those of `peers.py`. A line a case: medians, and the median ratio with its error.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = (("alexnet", 4, 60), ("resnet18", 4, 60), ("tower", 2, 150), ("tower", 4, 120))
"""Model, workers, turns."""
STEPS = {"alexnet": 1, "resnet18": 1, "tower": 2}
"""Steps of a turn."""


def work(what: str) -> None:
    """One worker of one version, whose `src` is on the path: a turn whenever it is told."""
    import torch
    from benchmarks import peers

    from stagewright.runtime.settings import Settings
    from stagewright.runtime.world import open_world

    torch.set_num_threads(1)
    with open_world(Settings(timeout_s=300.0)) as world:
        if what == "tower":
            data = peers.rows((1024,), 1024, 512)
            loss, targets = peers.cross_entropy_sum(), (data[1][:2],)
            model = peers.make_layered(peers.Tower(), (data[0][:2],), loss=loss, targets=targets)
            edges = [(model.num_layers - 1) * each // world.size for each in range(world.size)] + [model.num_layers]
            step = peers.ours(model, world, list(zip(edges, edges[1:])), 1, data, 8)
        else:
            data, model = peers.rows((3, 64, 64), 1000, 64), peers.build_model(what, image_size=64)
            step = peers.ours(model, world, [(0, model.num_layers)], world.size, data, 1)
        step(3)
        print("ready", flush=True)
        while sys.stdin.readline() == "turn\n":
            used, started = time.process_time(), time.perf_counter()
            step(STEPS[what])
            print(time.perf_counter() - started, time.process_time() - used, flush=True)
        os._exit(0)  # without waiting for its peers, which were told to end too


def start(root: Path, what: str, size: int, port: int) -> list[subprocess.Popen[str]]:
    """The workers of a version, when they have taken their first steps."""
    command = [sys.executable, str(Path(__file__).resolve()), "--work", what]
    common = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": str(port)}
    common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    workers = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]  # fmt: skip
    for worker in workers:
        if read(worker) != ["ready"]:
            sys.exit(f"a worker of {root} has ended")
    return workers


def read(worker: subprocess.Popen[str]) -> list[str]:
    """The next line of a worker, in words."""
    assert worker.stdout is not None
    return worker.stdout.readline().split()


def turn(workers: list[subprocess.Popen[str]]) -> tuple[float, float]:
    """Seconds of the slowest worker in one turn, and the CPU seconds of all."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("turn\n")
        worker.stdin.flush()
    told = [tuple(map(float, read(worker))) for worker in workers]
    return max(each[0] for each in told), sum(each[1] for each in told)


def compare(old: Path, what: str, size: int, turns: int) -> None:
    """A line of the table."""
    groups = [start(root, what, size, 29610 + number) for number, root in enumerate((old, Path(__file__).parents[1]))]
    pairs = []
    for number in range(turns):
        order = groups[:: 1 if number % 2 else -1]  # who comes second finds the caches as the first left them
        pairs.append([turn(group) for group in order][:: 1 if number % 2 else -1])
    for worker in (*groups[0], *groups[1]):
        worker.kill()
        worker.communicate()
    shown = []
    for which in (0, 1):
        ratios = [new[which] / before[which] for before, new in pairs]
        error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median
        shown.append(f"{statistics.median(ratios):5.3f} ± {error:5.3f}")
    before, new = (statistics.median(pair[side][0] for pair in pairs) * 1e3 for side in (0, 1))
    print(f"{what:9} {size} workers   {before:7.1f} → {new:7.1f} ms   {shown[0]}, of CPU time {shown[1]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(sys.argv[2])
    else:
        for case in CASES:
            compare(Path(sys.argv[1]).resolve(), *case)
