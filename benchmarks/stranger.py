"""Another user of the machine, with torch's own client: cannot stop, read or join a run, nor wear it out.

    python benchmarks/stranger.py [--tries 100] [--connections 10000] [--seed 0]

As root, which is needed to become somebody else. The run is one of four workers (three replicas, and a stage of one) on
this machine's own network, in a folder that anyone can reach but not enter; then the same under torchrun, whose store
has no password. Each try reads the run's files and memory, signals its processes, leaves the word that stops a run, and
speaks to a port as a client of a store and as a worker. The status is 1 when anything of that worked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks import chaos  # noqa: E402

STRANGER = 54_321
"""A user that nobody is."""
PATIENCE = timedelta(seconds=0.5)


def as_stranger(do: Callable[[], Any], limit_s: float) -> Any:
    """What a function gives in a process of the other user; what it raised; None where it takes too long."""
    import torch.distributed as dist

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with tempfile.TemporaryDirectory() as name:  # what torch loads late, Python's own folder may be closed for
                dist.init_process_group("gloo", store=dist.FileStore(f"{name}/store", 1), rank=0, world_size=1)
                dist.destroy_process_group()
            "host".encode("idna")  # as connections do
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            os.write(write, json.dumps(do()).encode())
        except BaseException as fault:
            os.write(write, json.dumps([f"the stranger itself failed: {fault!r}"]).encode())
        finally:
            os._exit(0)
    os.close(write)
    said = b""
    deadline = time.monotonic() + limit_s
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0] and (part := os.read(read, 1 << 16)):
        said += part
    os.close(read)
    with suppress(ProcessLookupError):  # a client of torch's may wait for an answer for ever
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(said) if said else None


def attack(processes: Sequence[int], folder: Path, port: int, at: str) -> list[str]:
    """One try at the run's files and processes, at a port as at a store, or as a worker; what worked."""
    import torch
    import torch.distributed as dist

    done = []

    def attempt(what: str, do: Callable[[], object]) -> None:
        with suppress(OSError, RuntimeError, ValueError):
            done.append(f"{what}: {do()!r}"[:200])

    def try_files() -> None:
        attempt("listed the folder", lambda: os.listdir(folder))
        for name in ("secret", "config.yaml", "run.json", "events.jsonl", "checkpoints/step-00000020/manifest.json"):
            attempt(f"read {name}", lambda name=name: (folder / name).read_bytes()[:9])
        attempt("left the word that stops it", lambda: (folder / "stop").write_text("a stranger"))
        for process in processes:
            for name in ("environ", "mem", "maps", "fd/0"):
                attempt(f"read {name} of {process}", lambda path=Path(f"/proc/{process}/{name}"): path.read_bytes())
            attempt(f"listed the files of {process}", lambda process=process: os.listdir(f"/proc/{process}/fd"))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):
                attempt(f"signalled {process}", lambda process=process, number=number: os.kill(process, number))

    def speak() -> object:
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=PATIENCE, wait_for_workers=False)
        store.set("stop/wish", "a stranger")
        return store.get("stop/wish")

    def join() -> object:
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=where, rank=1, world_size=4, timeout=PATIENCE)
        dist.all_reduce(torch.full((64,), float("nan")))
        return "all-reduced"

    if at == "files":
        try_files()
    elif at == "store":
        attempt(f"spoke to a store at {port}", speak)
    else:
        attempt(f"joined at {port}", join)
    return done


def forge(port: int) -> list[str]:
    """Leaves the words that stop a run and that blame a worker in torchrun's open store; how many keys it showed."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=PATIENCE, wait_for_workers=False)
    keys = [str(key) for key in store.list_keys()]
    prefixes = {
        "",
        *(key.removesuffix(end) for key in keys for end in ("/go", "welcome", "hello/0") if key.endswith(end)),
    }
    for prefix in prefixes:
        for word in ("stop/wish", *(f"stop/{worker}" for worker in range(4)), "busy/0"):
            store.set(f"{prefix.rstrip('/')}/{word}".lstrip("/"), f"{'0' * 64} 0")
    return keys


def connect(ports: Sequence[int], number: int, seed: int) -> int:
    """Opens so many connections: some say nothing, some speak and stay, some speak and go; how many were taken."""
    draw, kept, taken = random.Random(seed), list[socket.socket](), 0
    for place in range(number):
        with suppress(OSError):
            one = socket.create_connection(("127.0.0.1", ports[place % len(ports)]), timeout=2)
            one.settimeout(0.2)
            taken += 1
            one.sendall(draw.randbytes(draw.choice((0, 1, 8, 64, 4096))))
            kept.append(one) if draw.random() < 0.3 and len(kept) < 400 else one.close()
    return taken


def at_a_run(tries: int, connections: int, draw: random.Random, folder: Path) -> list[chaos.Line]:
    """A run of our own launcher: everything is tried, then it must get on and end well."""
    run = chaos.start("1f1b 3-1", folder / "run", 10_000_000, 20)
    chaos.wait_for_step(run, 20)
    ports = sorted({port for _, port in chaos.listening(run)})
    processes = [run.process.pid, *run.workers, *run.servers]
    worked: list[str] = []
    for _ in range(tries):
        port = draw.choice(ports)
        for at in ("files", "store", "group"):
            worked += as_stranger(lambda port=port, at=at: attack(processes, run.folder, port, at), 10) or []
    before = run.step()
    chaos.wait_for_step(run, before + 20)
    alive = run.process.poll() is None and run.step() > before
    lines = [
        chaos.Line(
            f"{tries} tries at a run with {len(ports)} ports", "nothing is stopped, read or joined",
            "nothing was; it got on", worked[:9] + ([] if alive else ["it did not get on"]),
        )
    ]  # fmt: skip
    taken = as_stranger(lambda: connect(ports, connections, draw.randrange(9999)), 600) if connections else 0
    before = run.step()
    chaos.wait_for_step(run, before + 40)
    chaos.hurt(run.process.pid, signal.SIGTERM)
    try:
        said, step = chaos.finish(run, 120), chaos.weights(run.folder)[1]
        faults = [] if step >= before + 40 and "stopped: by SIGTERM" in said else [f"it stood still at step {step}"]
    except AssertionError as fault:
        step, faults = 0, [str(fault)]
    found = f"{taken:,} were taken; step {before} then, ended well after step {step}"
    return [*lines, chaos.Line(f"{connections:,} connections to its ports", "it goes on, and finishes", found, faults)]


def under_torchrun(tries: int, folder: Path) -> chaos.Line:
    """A run of torchrun: its store shows its keys to anyone, and words in it that are not signed are not heeded."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "4", "--rdzv-backend"),
        *("static", "--master-addr", "127.0.0.1", "--master-port", str(port), str(ROOT / "benchmarks" / "chaos.py")),
        *("--run", "1f1b 3-1", str(folder / "under"), "10000000", "20", "48", "0"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / "torchrun.log").open("w+b") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        run = chaos.Run(process, folder / "under", False, log)
        chaos.wait_for_step(run, 20)
        keys = 0
        for _ in range(tries):
            keys = max(keys, len(as_stranger(lambda: forge(port), 60) or []))
        before = run.step()
        chaos.wait_for_step(run, before + 40)
        faults = [] if process.poll() is None and run.step() >= before + 40 else [f"it ended: {run.said()[-900:]}"]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    found = f"{keys} keys of torchrun's store were shown; no word was heeded, it got on"
    return chaos.Line(
        f"{tries} tries to stop a run of torchrun by its store", "words not signed are not heeded", found, faults
    )


def main() -> int:
    """Prints a line for each part."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tries", 100), ("connections", 10_000), ("seed", 0)):
        asked.add_argument(f"--{name}", type=int, default=default)
    own = asked.parse_args()
    if os.geteuid() != 0:
        print("left out: needs root, to become another user")
        return 0
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # it tells every refusal at length
    chaos.IS_ROOT = False  # a run on the machine's own network, as its other users have it
    with tempfile.TemporaryDirectory(prefix="stranger-") as name:
        Path(name).chmod(0o755)
        lines = at_a_run(own.tries, own.connections, random.Random(own.seed), Path(name))
        return chaos.show([*lines, under_torchrun(own.tries, Path(name))])


if __name__ == "__main__":
    started = time.monotonic()
    status = main()
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(status)
