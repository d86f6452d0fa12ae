"""The guides for several hosts: over a real ssh between two networks, and under SLURM's variables."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from benchmarks.ssh import SSHD, ssh_servers

from stagewright.record import Record
from stagewright.rehearsal import emulated_hosts
from stagewright.rehearsal.tools import missing
from stagewright.runtime.checkpoint.storage import find_checkpoint
from tests.guides.running import GUIDES, follow, run
from tests.rehearsal.clusters import star

pytestmark = pytest.mark.timeout(600)

SRUN = """#!/usr/bin/env python3
# Starts tasks as SLURM does with --distribution=arbitrary: one for each line of SLURM_HOSTFILE, here as processes.
import os, subprocess, sys
hosts = open(os.environ["SLURM_HOSTFILE"]).read().split()
options = dict(word[2:].split("=") for word in sys.argv[1:4])
assert options == {"ntasks": str(len(hosts)), "distribution": "arbitrary", "kill-on-bad-exit": "1"}, options
order = list(dict.fromkeys(hosts))
print("tasks on", *hosts, flush=True)
common = {**os.environ, "SLURM_NTASKS": options["ntasks"], "SLURM_STEP_NODELIST": ",".join(order)}
tasks = []
for task, host in enumerate(hosts):
    own = {"SLURM_PROCID": task, "SLURM_LOCALID": hosts[:task].count(host), "SLURM_NODEID": order.index(host)}
    own = {**common, **{key: str(value) for key, value in own.items()}}
    tasks.append(subprocess.Popen(sys.argv[4:], env=own))
sys.exit(max(task.wait() for task in tasks))
"""


def workers_of(folder: Path) -> tuple[int, ...]:
    """How many workers each of the two hosts had in a run that has ended."""
    return Record.load(folder / "record.json").plan.host_workers(2)


@pytest.mark.skipif(SSHD is None or missing() is not None, reason=f"sshd: {SSHD}, emulated hosts: {missing()}")
def test_two_machines_over_ssh_and_torchrun(fresh: Path, tmp_path: Path) -> None:
    """Each host is a network of its own, with a server of its own."""
    keys, work = tmp_path / "keys", tmp_path / "work"
    keys.mkdir()
    work.mkdir()
    with emulated_hosts(star(1e8, 1e8)) as hosts:
        one, other = hosts.addresses[:2]
        with ssh_servers(keys, [one], [other], enter=hosts.enter) as path:
            variables = {"HOST1": one, "HOST2": other, "PATH": f"{fresh}:{path}"}
            said = follow(GUIDES / "two-machines.md", fresh, work, enter=partial(hosts.enter, 0), **variables)
    assert f"-- {other} " in (work / "run.sh").read_text()
    assert [workers_of(work / "results" / name) for name in ("two", "script")] == [(2, 1)] * 2, said
    assert (work / "results" / "two" / "logs" / "host-1.log").exists()
    assert workers_of(work / "results" / "torchrun") == (3, 0)


def test_a_slurm_script_places_tasks_by_its_file_of_hosts_and_goes_on(fresh: Path, tmp_path: Path) -> None:
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.2\necho 127.0.0.3\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    follow(GUIDES / "slurm.md", fresh, tmp_path)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "127.0.0.[2-3]", "SLURM_NTASKS": "4"}
    own = {**os.environ, **job, "OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    own.pop("PYTHONPATH", None)
    first, again = (run(["bash", script], tmp_path, own) for script in ("run.sh", "again.sh"))
    assert "tasks on 127.0.0.2 127.0.0.2 127.0.0.3" in first
    assert "going on after step 10" in again
    assert workers_of(tmp_path / "results" / "slurm") == (2, 1)
    found = find_checkpoint(tmp_path / "results" / "slurm", print)
    assert found is not None
    assert found[1]["step"] == 20
    assert list(tmp_path.glob("hosts.*")) == []
