"""What a run survives: killed workers, torn checkpoints, full disks, damaged inputs, strangers, and ten thousand steps.

    python benchmarks/chaos.py [--kills 200] [--writes 50] [--inputs 100000] [--connections 1000] [--steps 10000]
    python benchmarks/chaos.py --kills 6 --writes 3 --inputs 2000 --connections 50 --steps 1000        (in small)
    python benchmarks/chaos.py --hosts        (benchmarks/chaos_hosts.py: the same for a run on four hosts)

A part with 0 is left out. Every line of the table says what was done, what was promised and what came out; the status
is 1 when a promise was broken. Runs have real workers on the CPU. As root each one has a network of its own, whose link
is cut now and then, and the disk that fills up is a small one in memory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
PLANS = {"dp": ("0:0-3", "0"), "1f1b 3-1": ("0:0-2.0:3", "0"), "ssp 3-1": ("0:0-2.0:3", "ssp"), "1-1": ("0:0.0:1", "0")}
BATCH, WIDTH = 24, 48
TIMEOUT_S = 6.0
IS_ROOT = os.geteuid() == 0 and shutil.which("unshare") is not None and shutil.which("ip") is not None


# The run that is tormented


def run_training(plan: str, folder: str, steps: str, every: str, width: str, restarts: str) -> None:
    """Trains a small tower; this is what the tormented processes run."""
    import torch

    import stagewright as sw
    from stagewright.cluster import parse_placement
    from stagewright.plan import parse_staleness

    torch.manual_seed(0)
    size, (placement, staleness) = int(width), PLANS[plan]
    layers = [torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.Tanh()) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(size, 4))

    def rows(batch, start, stop):
        inputs = torch.randn(BATCH, size, generator=torch.Generator().manual_seed(batch))
        return (inputs[start:stop],), (inputs[start:stop, :4].argmax(dim=1),)

    target = torch.zeros(2, dtype=torch.long)
    loss = sw.mean_loss(torch.nn.functional.cross_entropy)
    layered = sw.make_layered(model, (torch.zeros(2, size),), loss=loss, targets=(target,))
    groups = parse_placement(placement)
    cut = [len(layered.names) * number // len(groups) for number in range(len(groups) + 1)]
    versions = parse_staleness(staleness, len(groups))
    stages = tuple(
        sw.Stage(layers=layered.names[cut[n] : cut[n + 1]], devices=group, versions=versions[n], num_buckets=2)
        for n, group in enumerate(groups)
    )
    job = sw.Job(
        name="chaos", steps=int(steps), checkpoint_every=int(every), resume="auto", log_every=int(every),
        max_restarts=int(restarts),
    )  # fmt: skip
    sw.train(
        sw.make_schedule(sw.Plan(model="chaos", stages=stages, batch=BATCH, num_microbatches=2)), layered, data=rows,
        recipe=sw.Recipe(learning_rate=0.05), job=job, folder=folder,
        settings=sw.Settings(timeout_s=TIMEOUT_S, start_timeout_s=60),
    )  # fmt: skip


@dataclass
class Run:
    """A training run in a process of its own, with the processes it started."""

    process: subprocess.Popen[bytes]
    folder: Path
    has_own_network: bool
    output: IO[bytes]
    """What it says goes to a file: nobody reads a pipe while the run is tormented, and a full one would stop it."""

    def said(self) -> str:
        """Everything that it has said."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    @property
    def workers(self) -> list[int]:
        """The workers that are alive; they are forked of a process that the launcher started."""
        return [child for server in self.servers for child in children_of(server)]

    @property
    def servers(self) -> list[int]:
        """The process that workers are forked of, while there is one."""
        return [child for child in children_of(self.process.pid) if is_fork_server(child)]

    def step(self) -> int:
        """The last checkpoint's step, good or not."""
        names = [path.name for path in (self.folder / "checkpoints").glob("step-*")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def enter(self, *command: str) -> None:
        """Runs a command in the run's own network."""
        subprocess.run(["nsenter", "-t", str(self.process.pid), "-n", *command], check=False, capture_output=True)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that are alive."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if parent_of(number) == pid]


def is_fork_server(pid: int) -> bool:
    """Whether a process is Python's fork server, and not what counts its semaphores."""
    try:
        return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def parent_of(pid: int) -> int | None:
    """A process's parent, if there still is such a process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def start(plan: str, folder: Path, steps: int, every: int, *, width: int = WIDTH, restarts: int = 0) -> Run:
    """Starts a run; as root with a network of its own, so that its link can be cut."""
    command = [
        sys.executable, str(Path(__file__).resolve()), "--run", plan, str(folder), str(steps), str(every), str(width),
        str(restarts),
    ]  # fmt: skip
    if IS_ROOT:
        command = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder.parent),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    output = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    return Run(process, folder, IS_ROOT, output)


def finish(run: Run, timeout_s: float) -> str:
    """Waits for a run to end well, and returns what it said."""
    fault = None
    try:
        if run.process.wait(timeout_s) != 0:
            fault = f"the run ended with {run.process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        fault = "the run hung"
    with run.output:
        said = run.said()
    assert fault is None, f"{fault}: {said[-1500:]}"
    return said


def weights(folder: Path):
    """The model of the last good checkpoint, and its step."""
    from stagewright.runtime.checkpoint.resuming import whole_model
    from stagewright.runtime.checkpoint.storage import find_checkpoint

    found = find_checkpoint(folder, lambda text: None)
    assert found is not None, f"{folder} has no good checkpoint"
    return whole_model(found[0]), found[1]["step"]


def are_equal(one, other) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def left_behind(folder: Path) -> list[str]:
    """Processes and temporary files of a run that is over."""
    found = [str(path) for path in folder.rglob(".*.part")]
    known = (folder.name, "undisturbed", "torchinductor_")
    found += [str(path) for path in folder.parent.iterdir() if not path.name.startswith(known)]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(f"process {entry.name}")
        except OSError:
            continue
    return found


# The table


@dataclass
class Line:
    """One promise, and what came of it."""

    what: str
    promise: str
    found: str
    faults: list[str] = field(default_factory=list)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        yield Path(name)


# 1. Kills


def progress(text: str) -> None:
    """Tells on stderr how far it is, with the time: what runs for an hour must be seen to be alive."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def kill_workers(number: int, draw: random.Random, per_run: int = 10) -> Line:
    """Kills, stops and cuts off workers at random moments; every run must come to the same weights."""
    faults, done, slowest = [], {"kill": 0, "stop": 0, "cut": 0}, 0.0
    names = ("dp", "1f1b 3-1", "ssp 3-1")
    with scratch() as folder:
        for place, plan in enumerate(names):
            left = number // len(names) + (place < number % len(names))
            steps, home = 240, folder / plan.replace(" ", "-")
            finish(start(plan, home / "undisturbed", steps, 20), 180)
            expected, _ = weights(home / "undisturbed")
            turn = 0
            while left > 0 and turn < number:
                before, turn = sum(done.values()), turn + 1
                try:
                    kills = min(left, per_run)
                    slowest = max(slowest, torment(plan, home / f"run-{turn}", steps, kills, expected, draw, done))
                except AssertionError as fault:
                    faults.append(f"{plan}: {fault}")
                    progress(f"broken: {faults[-1]}")
                left -= sum(done.values()) - before
    sums = ", ".join(f"{count} {how}" for how, count in done.items())
    promise = "resumes by itself, same weights, nothing left behind"
    return Line(
        f"{sum(done.values())} kills over {', '.join(names)}", promise, f"{sums}; longest run {slowest:.0f} s", faults
    )


def torment(
    plan: str, folder: Path, steps: int, kills: int, expected, draw: random.Random, done: dict[str, int]
) -> float:
    """One run with some harm done to it; returns the seconds it took."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    run = start(plan, folder, steps, 5, restarts=10_000)
    for _ in range(kills):
        how = harm(run, draw, done)
        seconds = time.monotonic() - started
        progress(f"{plan} {folder.name}: {sum(done.values())} kills, {how} at step {run.step()} after {seconds:.0f} s")
        if run.process.poll() is not None:
            break
    finish(run, 400)
    found, step = weights(folder)
    assert step == steps, f"it ended after step {step} of {steps}"
    assert are_equal(found, expected), "the weights differ from the undisturbed run's"
    time.sleep(0.3)
    assert not left_behind(folder), f"left behind: {left_behind(folder)[:3]}"
    shutil.rmtree(folder)
    return time.monotonic() - started


def harm(run: Run, draw: random.Random, done: dict[str, int]) -> str:
    """Waits for a random moment and does harm to a worker; not before it has got on, or it never would. Says how."""
    before, deadline = run.step(), time.monotonic() + 120
    is_early = draw.random() < 0.25
    while run.process.poll() is None and time.monotonic() < deadline:
        workers = run.workers
        if workers and (is_early or run.step() > before):
            break
        time.sleep(0.02)
    time.sleep(draw.uniform(0.0, 1.5 if is_early else 0.2))
    workers = run.workers
    how = draw.choices(("kill", "stop", "cut"), (8, 1, 0 if is_early else 1))[0]
    if not workers or run.process.poll() is not None:
        return "nothing"
    if how == "cut" and run.has_own_network:
        run.enter("ip", "link", "set", "lo", "down")
        time.sleep(TIMEOUT_S + 3)
        run.enter("ip", "link", "set", "lo", "up")
    else:
        how = "kill" if how == "cut" else how
        hurt(draw.choice([*workers, *run.servers]), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    done[how] += 1
    return f"early {how}" if is_early else how


def hurt(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a worker that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# 2. Checkpoints


def kill_writers(number: int, draw: random.Random) -> Line:
    """Kills a worker while a checkpoint is being written; the one before must be found and used."""
    faults, hits, seen = [], 0, 0
    with scratch() as folder:
        home = folder / "run"
        run = start("1-1", home, 100_000, 3, width=700, restarts=10_000)
        while hits < number:
            part = wait_for_part(run, home, draw)
            if part is None:
                faults.append("the run does not get on")
                break
            hurt(draw.choice(run.workers or [run.process.pid]), signal.SIGKILL)
            hits += 1
            seen += is_passed_over(home, part, faults)
            progress(f"{hits} kills while {part.name} was written, {seen} left it torn")
        hurt(run.process.pid, signal.SIGTERM)
        out = finish(run, 120)
        faults += [] if "stopped: by" in out else ["SIGTERM was not answered by a checkpoint"]
        faults += left_behind(home)
    text = f"{hits} kills, {seen} left a torn one that was not taken; then SIGTERM: saved and ended with 0"
    return Line(f"{number} kills while a checkpoint is written", "the one before is used, and it says so", text, faults)


def wait_for_part(run: Run, home: Path, draw: random.Random) -> Path | None:
    """A checkpoint that is being written after the run has got on, a random moment into it."""
    before, deadline = run.step(), time.monotonic() + 120
    while time.monotonic() < deadline and run.process.poll() is None:
        newest = run.step()
        for part in (home / "checkpoints").glob(".step-*.part"):
            # Old ones have such a name too while they are removed.
            if newest > before and int(part.name[6:14]) > newest and part.exists():
                time.sleep(draw.uniform(0, 0.02))
                return part
        time.sleep(0.001)
    return None


def is_passed_over(home: Path, part: Path, faults: list[str]) -> bool:
    """Whether the kill left a torn checkpoint; a good one must be found in any case, and not that."""
    from stagewright.runtime.checkpoint.storage import find_checkpoint

    torn = part.exists()
    try:
        found = find_checkpoint(home, lambda text: None)
    except OSError:  # the run goes on meanwhile and removes old ones
        return torn
    if found is None or (torn and found[0].name in part.name and part.exists()):
        faults.append(f"{part.name} was torn, but {found[0].name if found else 'nothing'} was found")
    return torn


def flip_bytes(draw: random.Random) -> Line:
    """Flips a bit in every file of the newest checkpoint, one after another."""
    from stagewright.runtime.checkpoint.storage import checkpoints_in, find_checkpoint

    faults, files = [], 0
    with scratch() as folder:
        finish(start("1f1b 3-1", folder / "run", 20, 10), 120)
        newest = checkpoints_in(folder / "run")[0]
        for path in sorted(newest.iterdir()):
            whole, place = path.read_bytes(), draw.randrange(path.stat().st_size)
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
            words: list[str] = []
            found = find_checkpoint(folder / "run", words.append)
            files += 1
            if found is None or found[1]["step"] != 10 or not words:
                faults.append(f"{path.name}: byte {place} was flipped unseen")
            path.write_bytes(whole)
    return Line(
        "a flipped bit in any file",
        "the one before is used, and it says so",
        f"seen in {files} of {files} files",
        faults,
    )


def fill_disk() -> Line:
    """Trains on a disk that is full after a few checkpoints; the run goes on and keeps the good ones."""
    what, promise = "a full disk", "the run goes on, the last good one is kept"
    if not IS_ROOT:
        return Line(what, promise, "left out: needs root")
    with scratch() as folder:
        disk = folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], check=True)
        try:
            (disk / "ballast").write_bytes(bytes(4 << 20))
            import_module("stagewright.runtime.checkpoint.resuming")  # takes seconds, in which the run would be over
            run = start("1-1", disk / "run", 2000, 10, width=400)
            wait_for_step(run, 10)
            fill(disk / "more")
            time.sleep(2)
            _, full = weights(disk / "run")
            (disk / "more").unlink()
            out = finish(run, 120)
            _, step = weights(disk / "run")
            said = "could not be saved: OSError: [Errno 28] No space left on device" in out
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
    faults = [] if said and full >= 10 and step == 2000 else [f"step {full}, then {step}: {out[-800:]}"]
    return Line(what, promise, f"step {full} is good meanwhile; told; all 2,000 steps done and saved", faults)


def fill(path: Path) -> None:
    """Writes until nothing more fits."""
    try:
        with path.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
    except OSError:
        return


# 3. Inputs


def damage_inputs(number: int, seed: int) -> Line:
    """Damaged inputs of every kind: a clear error or a valid value, soon and in little memory."""
    from benchmarks.mutations import try_inputs

    outcomes = dict(try_inputs(number, seed))
    valid, refused = (sum(getattr(each, key) for each in outcomes.values()) for key in ("valid", "refused"))
    slowest = max(each.slowest_s for each in outcomes.values())
    faults = [f"{kind}: {fault}" for kind, each in outcomes.items() for fault in each.faults]
    text = f"{refused:,} refused, {valid:,} still valid, slowest {slowest:.2f} s"
    return Line(
        f"{number:,} damaged inputs of {len(outcomes)} kinds",
        "an error in words or a value, < 1 s, < 1 GiB",
        text,
        faults,
    )


# 4. A stranger


def annoy(connections: int, draw: random.Random) -> Line:
    """Opens connections with random bytes to every port that a run listens on."""
    faults: list[str] = []
    with scratch() as folder:
        run = start("1f1b 3-1", folder / "run", 1_000_000, 50)
        wait_for_step(run, 50)
        ports = listening(run)
        outside = [f"{address}:{port}" for address, port in ports if not address.startswith("127.")]
        stranger = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--stranger",
            str(connections),
            str(draw.randrange(9999)),
        ]
        subprocess.run([*inside(run), *stranger, *(str(port) for _, port in ports)], timeout=600, check=True)
        before = run.step()
        wait_for_step(run, before + 100)
        hurt(run.process.pid, signal.SIGTERM)
        try:
            finish(run, 300)
            faults += [] if weights(folder / "run")[1] > before else ["it did not get on"]
        except AssertionError as fault:
            faults.append(str(fault))
    if outside:
        faults.append(f"listens beyond loopback: {outside}")
    what = f"{connections:,} connections of random bytes to each of {len(ports)} ports"
    found = f"step {before} meanwhile, then on and ended with 0" if not faults else "failed"
    return Line(what, "training goes on and finishes; only loopback is listened on", found, faults)


def wait_for_step(run: Run, step: int, timeout_s: float = 180.0) -> None:
    """Waits until a run has saved a step, or is over."""
    deadline = time.monotonic() + timeout_s
    while run.step() < step and run.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def inside(run: Run) -> list[str]:
    """What enters a run's network."""
    return ["nsenter", "-t", str(run.process.pid), "-n"] if run.has_own_network else []


def listening(run: Run) -> list[tuple[str, int]]:
    """(address, port) that the run's processes listen on."""
    out = subprocess.run([*inside(run), "ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    own, found = {run.process.pid, *run.workers}, []
    for line in out.splitlines():
        if any(f"pid={pid}," in line for pid in own):
            address, _, port = line.split()[3].rpartition(":")
            found.append((address.strip("[]"), int(port)))
    return sorted(set(found))


def be_a_stranger(connections: str, seed: str, *ports: str) -> None:
    """Opens the connections: some say nothing, some speak and stay, some speak and go."""
    draw = random.Random(int(seed))
    kept: list[socket.socket] = []
    for port in ports:
        for _ in range(int(connections)):
            try:
                one = socket.create_connection(("127.0.0.1", int(port)), timeout=2)
                one.settimeout(0.2)
                one.sendall(draw.randbytes(draw.choice((0, 1, 7, 8, 9, 64, 4096))))
            except OSError:
                continue
            if draw.random() < 0.3 and len(kept) < 400:
                kept.append(one)
            else:
                one.close()


# 5. Ten thousand steps


def run_long(steps: int) -> Line:
    """Trains for many steps; no worker's memory or number of open files may grow after the first 500."""
    faults: list[str] = []
    with scratch() as folder:
        run = start("1f1b 3-1", folder / "run", steps, max(100, steps // 20))
        early = min(500, steps // 4)
        wait_for_step(run, early)
        first = {pid: usage(pid) for pid in run.workers}
        last = first
        while run.process.poll() is None and run.step() < steps:
            last = {pid: usage(pid) or last[pid] for pid in first if usage(pid)} or last
            time.sleep(0.3)
        finish(run, 300)
    drift = max((last[pid][0] / first[pid][0] - 1 for pid in last if first.get(pid)), default=1.0)
    files = max((last[pid][1] - first[pid][1] for pid in last if first.get(pid)), default=99)
    faults += [] if drift < 0.01 else [f"memory grew by {drift:.1%}"]
    faults += [] if files <= 0 else [f"{files} more open files"]
    return Line(
        f"{steps:,} steps",
        "memory within 1% after 500 steps, no open files gained",
        f"memory {drift:+.2%}, files {files:+d}",
        faults,
    )


def usage(pid: int) -> tuple[int, int] | None:
    """(resident bytes, open files) of a process."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * 4096, len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (OSError, ValueError, IndexError):
        return None


def main() -> int:
    """Runs the parts that are asked for, and prints the table."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"kills": 200, "writes": 50, "inputs": 100_000, "connections": 1000, "steps": 10_000, "seed": 0}
    for name, value in defaults.items():
        words.add_argument(f"--{name}", type=int, default=value)
    chosen = words.parse_args()
    draw = random.Random(chosen.seed)
    parts: list[tuple[int, Callable[[], Line]]] = [
        (chosen.kills, lambda: kill_workers(chosen.kills, draw)),
        (chosen.writes, lambda: kill_writers(chosen.writes, draw)),
        (chosen.writes, fill_disk),
        (chosen.writes, lambda: flip_bytes(draw)),
        (chosen.inputs, lambda: damage_inputs(chosen.inputs, chosen.seed)),
        (chosen.connections, lambda: annoy(chosen.connections, draw)),
        (chosen.steps, lambda: run_long(chosen.steps)),
    ]
    return show([part() for number, part in parts if number])


def show(lines: list[Line]) -> int:
    """Prints the table and, under it, what went wrong; 1 when anything did."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "promise", "found", "", box=None, pad_edge=False)
    for line in lines:
        table.add_row(line.what, line.promise, line.found, "[red]broken" if line.faults else "[green]kept")
    console = Console()
    console.print(table)
    for line in lines:
        for fault in line.faults[:10]:
            console.print(f"{line.what}: {fault}", markup=False, highlight=False)
    return int(any(line.faults for line in lines))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--run"]:
        run_training(*sys.argv[2:])
    elif sys.argv[1:2] == ["--stranger"]:
        be_a_stranger(*sys.argv[2:])
    elif sys.argv[1:2] == ["--hosts"]:
        sys.exit(import_module("benchmarks.chaos_hosts").run_all(sys.argv[2:]))
    else:
        sys.exit(main())
