"""A link between two hosts that is cut for good: every worker on both sides ends soon, and names the host it lost."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from stagewright.rehearsal import emulated_hosts
from stagewright.rehearsal.hosts import EmulatedHosts, namespace
from stagewright.rehearsal.tools import call, missing
from stagewright.runtime.checkpoint.storage import checkpoints_in
from stagewright.runtime.launch.meeting import Place, lost_hosts
from tests.rehearsal.clusters import star
from tests.runtime.running import ROOT
from tests.training.test_run_folder import wait_until

TIMEOUT_S = 12.0
SLACK_S = 3.0
"""What a busy machine may add."""
TRAIN = (
    "-m", "stagewright", "train", "tiny-cnn", "--device", "cpu", "--batch", "8", "--steps", "1000000", "--threads", "1",
    "--checkpoint-every", "20", "--timeout", str(TIMEOUT_S),
)  # fmt: skip
pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"emulated hosts: {missing()}"),
    pytest.mark.timeout(200),
]


def start(hosts: EmulatedHosts, host: int, folder: Path, placement: str, log: Path) -> subprocess.Popen[bytes]:
    """Starts torchrun with two workers in a host; which interface to use it is not told."""
    agent = ["--nnodes=2", f"--node-rank={host}", "--nproc-per-node=2", f"--master-addr={hosts.addresses[0]}"]
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *agent,
        "--master-port=29500",
        *TRAIN,
        "-o",
        str(folder),
        *placement.split(),
    ]
    with log.open("wb") as file:
        return subprocess.Popen(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, preexec_fn=partial(hosts.enter, host)
        )


def workers_in(hosts: EmulatedHosts, host: int) -> list[int]:
    """The processes in a host that are workers."""
    found = []
    for pid in call("ip", "netns", "pids", namespace(hosts.key, host)).split():
        try:
            if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("placement", ["--placement 0:0-1,1:0-1", "--placement 0:0-1.1:0-1 --cut fc1"])
def test_all_workers_end_within_one_and_a_half_timeouts_and_name_the_lost_host(placement: str, tmp_path: Path) -> None:
    folder, logs = tmp_path / "run", [tmp_path / f"host-{host}.log" for host in range(2)]
    with emulated_hosts(star(1e8, 1e8)) as hosts:
        runs = [start(hosts, host, folder, placement, logs[host]) for host in range(2)]
        try:
            wait_until(lambda: bool(checkpoints_in(folder)) or any(run.poll() is not None for run in runs), 120)
            assert [len(workers_in(hosts, host)) for host in range(2)] == [2, 2], logs[0].read_text()[-2000:]
            call("ip", "-n", namespace(hosts.key, "switch"), "link", "set", "port1", "down")
            cut = time.monotonic()
            wait_until(lambda: not workers_in(hosts, 0) and not workers_in(hosts, 1), 60)
            took_s = time.monotonic() - cut
        finally:
            for run in runs:
                run.kill()
                run.wait(10)
    said = [log.read_text(errors="replace") for log in logs]
    print(f"{placement}: all ended {took_s / TIMEOUT_S:.2f} timeouts after the cut")
    assert took_s < 1.5 * TIMEOUT_S + SLACK_S, said
    for host, text in enumerate(said):
        assert f"({hosts.addresses[1 - host]}) does not answer" in text, text[-3000:]


def test_hosts_that_the_kernel_knows_to_be_gone_are_lost_at_once() -> None:
    """A refusal is an answer; a connection that fails before it is under way is none."""
    addresses = {"here": "127.0.0.1", "refuses": "127.0.0.1", "gone": "255.255.255.255"}
    places = [Place(name, name, address, False) for name, address in addresses.items()]
    assert lost_hosts(places, 0, 5.0) == ["gone (255.255.255.255)"]
