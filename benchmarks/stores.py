"""Checkpoints in an S3 that loses one request in five: none that is torn is ever taken, and no good one is lost.

    pip install s3fs 'moto[server]'
    python benchmarks/stores.py [--rounds 200] [--kills 5] [--loss 0.2] [--seed 0]

moto's server plays S3 behind a proxy. A request that is lost goes nowhere, or arrives and is never answered, or is
answered with 503, or with half of the answer. What is really there is read from the server itself. A part with 0 is
left out; the status is 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).parents[1]
BUCKET = "kept"
ACCOUNT = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to the server behind it, or loses them."""

    protocol_version = "HTTP/1.1"
    behind, loss, draw = 0, 0.0, random.Random(0)
    seen: ClassVar[Counter[str]] = Counter()

    def pass_on(self) -> None:
        """One request."""
        body = self.body()
        how = self.draw.choice(("before", "after", "503", "half")) if self.draw.random() < self.loss else "kept"
        self.seen[how] += 1
        if how == "before":
            self.close_connection = True
            return
        if how == "503":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        link = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=60)
        link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                link.putheader(name, value)
        link.endheaders(body)
        answer = link.getresponse()
        said = answer.read()
        if how == "after":
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(said))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(said[: len(said) // 2] if how == "half" else said)
        self.close_connection = how == "half"

    def body(self) -> bytes:
        """What came with the request, as it came."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        found = b""
        while True:
            line = self.rfile.readline()
            size = int(line.split(b";")[0], 16)
            found += line + self.rfile.read(size + 2)
            if size == 0:
                return found

    def do_any(self) -> None:
        """One request, of a client that may be killed meanwhile."""
        with suppress(OSError):
            self.pass_on()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any  # noqa: N815

    def log_message(self, *words: object) -> None:
        """Nothing."""


@contextmanager
def store(loss: float, seed: int) -> Iterator[tuple[str, str]]:
    """The addresses of an S3 that loses requests, and of the same without losses, with an empty bucket."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    Proxy.behind, Proxy.loss, Proxy.draw, Proxy.seen = port, loss, random.Random(seed), Counter()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            time.sleep(0.1)
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        link.request("PUT", f"/{BUCKET}")
        assert link.getresponse().status == 200, "the bucket could not be made"
        yield f"http://127.0.0.1:{proxy.server_address[1]}", f"http://127.0.0.1:{port}"
    finally:
        proxy.shutdown()
        server.terminate()
        server.wait(30)


def truth(address: str, folder: str):
    """What the server itself has: a Store without losses."""
    import fsspec

    from stagewright.runtime.checkpoint.remote import Store

    system = fsspec.filesystem("s3", endpoint_url=address, use_listings_cache=False, skip_instance_cache=True)
    return Store(url=f"s3://{BUCKET}/{folder}", system=system, root=f"{BUCKET}/{folder}")


def copy_rounds(rounds: int, lossy: str, plain: str, draw: random.Random) -> tuple[str, list[str]]:
    """Checkpoints of three workers that are copied, some broken off half-way; another host takes the newest again."""
    import torch

    from stagewright.errors import CheckpointError
    from stagewright.runtime.checkpoint.remote import Copier, Store, fetch
    from stagewright.runtime.checkpoint.resuming import whole_model
    from stagewright.runtime.checkpoint.storage import finish, part_of, path_of, write_part
    from stagewright.runtime.settings import Settings
    from stagewright.runtime.world import open_world

    os.environ["AWS_ENDPOINT_URL"] = lossy
    url, real, faults = f"s3://{BUCKET}/rounds", truth(plain, "rounds"), list[str]()
    copied = broken = failed = taken = newest = 0
    with tempfile.TemporaryDirectory() as name, open_world(Settings()) as world:
        copier = Copier(Store.open(url), world, keep=2, run="mine", limit_s=300)
        for step in range(1, rounds + 1):
            path = path_of(Path(name), step)
            parts = [
                write_part(path, worker, {f"model/{worker}": torch.full((4096,), float(step))}) for worker in range(3)
            ]
            finish(path, {"step": step, "run": "mine", "aliases": {}}, parts)
            try:
                copier.store.open_for(path)
                for worker in draw.sample((1, 2), 2):
                    copier.store.send(path, part_of(worker))
                    if draw.random() < 0.1:
                        raise InterruptedError
                copier.finish(path)
                copied, failed = copied + (copier.fault is None), failed + (copier.fault is not None)
            except InterruptedError:
                broken += 1
            except CheckpointError:
                failed += 1
            good = [int(each.removeprefix("step-")) for each in real.names() if real.is_good(each)]
            if max(good, default=0) < newest:
                faults.append(f"round {step}: step {newest} was good and is gone")
            newest = max(good, default=0)
            if step % 5 == 0:
                found = fetch(Store.open(url), Path(name, "elsewhere"), "another", 0, lambda text: None, world)
                if found is not None:
                    taken += 1
                    numbers = {float(x) for tensor in whole_model(found[0]).values() for x in tensor}
                    if numbers != {float(found[1]["step"])} or found[1]["step"] not in good:
                        faults.append(f"round {step}: took {found[0].name}, which is torn")
                shutil.rmtree(Path(name, "elsewhere"), ignore_errors=True)
            shutil.rmtree(path)
            if step % 20 == 0:
                print(f"{time.strftime('%H:%M:%S')} round {step}: {copied} copied", file=sys.stderr, flush=True)
    told = f"{copied} copied, {broken} broken off, {failed} given up; {taken} taken again, none torn; newest {newest}"
    return told, faults


def train(folder: Path, address: str | None, steps: int) -> subprocess.Popen[bytes]:
    """Starts a run of two workers that copies to the store and goes on from there; one alone without an address."""
    command = [
        *(sys.executable, "-m", "stagewright", "train", "tiny-cnn", "--device", "cpu", "--batch", "8"),
        *("--devices", "2", "--threads", "1", "--steps", str(steps)),
        *("--checkpoint-every", "5", "-o", str(folder), "--log-every", "50"),
        *(() if address is None else ("--checkpoints", f"s3://{BUCKET}/run", "--resume", "auto")),
    ]  # fmt: skip
    environment = {**os.environ, "AWS_ENDPOINT_URL": address or "", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def kill_hosts(kills: int, lossy: str, plain: str, draw: random.Random) -> tuple[str, list[str]]:
    """Runs that are killed at a random moment and lose their disk; another one goes on from the store alone."""
    import torch

    from stagewright.runtime.checkpoint.resuming import whole_model
    from stagewright.runtime.checkpoint.storage import find_checkpoint, path_of

    real, faults, before, gone_on = truth(plain, "run"), list[str](), 0, list[int]()
    with tempfile.TemporaryDirectory() as name:
        for number in range(kills + 1):
            folder, last = Path(name, f"disk-{number}"), number == kills
            newest = [int(each[5:]) for each in real.names() if real.is_good(each)]
            if max(newest, default=0) < before:
                faults.append(f"step {before} was good and is gone")
            before = max(newest, default=0)
            run = train(folder, lossy, before + 40 if last else 1_000_000)
            deadline = time.monotonic() + 240
            while not last and run.poll() is None and time.monotonic() < deadline:
                if any(int(each[5:]) > before and not real.lacks(each) for each in real.names()):
                    time.sleep(draw.uniform(0, 3))
                    run.send_signal(signal.SIGKILL)  # its workers go with it
                    break
                time.sleep(0.2)
            said = run.communicate(timeout=400)[1].decode(errors="replace")
            events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
            told = [each["text"] for each in events if each["event"] == "resume" and "going on" in each["text"]]
            steps = [int(text.split()[4].rstrip(",")) for text in told]
            if before and (not steps or steps[0] < before or not real.is_good(f"step-{steps[0]:08d}")):
                faults.append(f"disk {number} went on after {steps}, and {before} was good: {said[-300:]}")
            gone_on += steps
            print(f"{time.strftime('%H:%M:%S')} disk {number}: went on after {steps}", file=sys.stderr, flush=True)
            if last and run.returncode != 0:
                faults.append(f"the last run ended with {run.returncode}: {said[-800:]}")
        found = find_checkpoint(Path(name, f"disk-{kills}"), print)
        assert found is not None, "the last run has saved nothing"
        undisturbed = train(Path(name, "undisturbed"), None, before + 40)
        assert undisturbed.wait(600) == 0, "the undisturbed run failed"
        one, other = (whole_model(path_of(folder.parent / each, before + 40)) for each in (folder.name, "undisturbed"))
        if any(not torch.equal(one[key], other[key]) for key in other):
            faults.append("the weights differ from the undisturbed run's")
        if not real.is_good(f"step-{before + 40:08d}"):
            faults.append("the last step is not in the store")
    after = ", ".join(map(str, gone_on))
    return f"{kills} disks lost; went on after steps {after}; weights of step {before + 40} as undisturbed", faults


def main() -> int:
    """Prints a line for each part."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 200), ("kills", 5), ("seed", 0)):
        asked.add_argument(f"--{name}", type=int, default=default)
    asked.add_argument("--loss", type=float, default=0.2)
    own = asked.parse_args()
    os.environ.update(ACCOUNT)
    broken = False
    for part, number in ((copy_rounds, own.rounds), (kill_hosts, own.kills)):
        if number:
            with store(own.loss, own.seed) as addresses:
                told, faults = part(number, *addresses, random.Random(own.seed))
            broken |= bool(faults)
            requests = ", ".join(f"{count:,} {how}" for how, count in sorted(Proxy.seen.items()))
            print(f"{part.__name__}: {told} (requests: {requests})", *faults, sep="\n  BROKEN: ", flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
