"""`stagewright launch`: prints what starts a run where its devices are; starts nothing."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import typer
import yaml

from stagewright.cli.options import Given, takes
from stagewright.cli.train import USUAL, Model, Run
from stagewright.cluster import count
from stagewright.errors import UsageError
from stagewright.training.config import NO_OPTION, SECTIONS, Config
from stagewright.training.sections import Key, section_keys

_NOTICE_S = 120
"""How long a run that has to go gets to save."""
_HERE = "/work"
"""Where the shared volume is in a container, and the command runs."""


@dataclass(frozen=True, kw_only=True)
class _Launch(Run):
    print: Literal["slurm", "kubernetes", "ssh", "skypilot"]
    """what to write"""
    image: str = "stagewright"
    """kubernetes: the container's image"""
    volume: str | None = None
    """kubernetes, skypilot: the shared volume (claim) in which the command runs"""
    accelerator: str | None = None
    """skypilot: what it calls the cards, such as H100"""


@dataclass(frozen=True)
class _Job:
    """What every form is written from."""

    config: Config
    own: _Launch
    words: list[str]
    """The command that each worker runs."""
    hosts: tuple[str, ...]
    """The hosts in use, by name where they are named."""
    workers: tuple[int, ...]
    """For each host in use how many workers it has."""

    @property
    def name(self) -> str:
        """A name that every scheduler takes."""
        return re.sub(r"[^a-z0-9]+", "-", self.config.model.name.lower()).strip("-")[:30] or "run"

    @property
    def cards(self) -> int:
        """How many cards each host is asked for: as many as the one that needs most."""
        return 0 if self.config.where.device == "cpu" else -(-max(self.workers) // self.config.where.share)

    @property
    def spread(self) -> str:
        """Where the workers are, in words."""
        each = " and ".join(map(str, self.workers))
        return f"{count(sum(self.workers), 'worker')} on {count(len(self.workers), 'host')}: {each}"

    def python(self, usual: str) -> str:
        """The Python of the hosts."""
        return self.config.where.remote_python or usual


@takes(
    sections={name: cls for name, cls in SECTIONS.items() if name != "rehearsal"},
    without=(*NO_OPTION, "run.print_config", "run.json"),
    usual={"Launch": ("print", "image", "volume", "accelerator"), **USUAL},
)
def launch(model: Model = None, *, run: _Launch, given: Given) -> None:
    """Prints a script or manifest that trains with these options of `train`, on hosts with unlike numbers of devices.

    Example: stagewright launch vgg16 --plan plan.json --out runs/vgg16 --print slurm > run.sh
    """
    from stagewright.runtime.launch.environment import expand_hosts
    from stagewright.training.command import planned

    config = run.read(model, given)
    if not (config.plan.file or config.plan.placement or config.where.devices):
        raise UsageError(
            "on which devices it is to run is not given", "add --plan FILE, --placement 0:0-2,1:0 or --devices N"
        )
    plan, names = planned(config), expand_hosts(config.where.nodes or "")
    workers = plan.host_workers(plan.devices[-1].host + 1)
    if names and len(names) != len(workers):
        raise UsageError(
            f"--nodes {config.where.nodes} names {count(len(names), 'host')}, but the plan uses {len(workers)}",
            f"name {count(len(workers), 'host')}, or change the plan",
        )
    used = [host for host, number in enumerate(workers) if number]
    hosts, workers = tuple(names[host] for host in used if names), tuple(workers[host] for host in used)
    typer.echo(_WRITERS[run.print](_Job(config, run, _typed(run, config, given), hosts, workers)), nl=False)


def _typed(run: Run, config: Config, given: Given) -> list[str]:
    """The command `train` with the options that were typed, but for those that say who starts it."""
    words = ["-m", "stagewright", "train", config.model.name]
    words += ["--config", str(run.config)] if run.config is not None else []
    words += ["--recipe", run.recipe] if run.recipe is not None else []
    for section, values in given.items():
        keys = {key.key: key for key in section_keys(SECTIONS[section])}
        for name, value in values.items():
            if name not in ("nodes", "remote_python"):
                words += _option(keys[name], value)
    is_fresh = config.job.max_restarts and config.job.resume is None
    return [*words, "--resume", "auto"] if is_fresh else words


def _option(key: Key, value: Any) -> list[str]:
    """An option as it is typed."""
    if key.kind is bool:
        return [key.option if value else f"--no-{key.option[2:]}"]
    if key.is_many and key.choices:
        return [f"--{each}" for each in value]
    return [key.option, str(value)]


def _slurm(job: _Job) -> str:
    most, host = max(job.workers), '"${hosts[number]}"'
    asked = [
        f"job-name={job.name}", f"nodes={len(job.workers)}", f"ntasks-per-node={most}",
        *([f"gpus-per-node={job.cards}"] if job.cards else []),
        *([f"nodelist={','.join(job.hosts)}"] if job.hosts else []),
        f"signal=USR1@{_NOTICE_S}",
    ]  # fmt: skip
    found = shlex.join(job.hosts) if job.hosts else '$(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    step = ["srun", f"--ntasks={sum(job.workers)}", "--distribution=arbitrary", "--kill-on-bad-exit=1"]
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH --{each}" for each in asked),
        f"# {job.spread}. SLURM gives each as much as the one that needs most.",
        "set -euo pipefail",
        f"workers=({' '.join(map(str, job.workers))})",
        f"hosts=({found})",
        'export MASTER_ADDR=${hosts[0]} SLURM_HOSTFILE=$PWD/hosts.$SLURM_JOB_ID',
        """trap 'rm -f "$SLURM_HOSTFILE"' EXIT""",
        "# A line for each worker: this is the order in which they count.",
        'for number in "${!workers[@]}"; do',
        f"  for ((worker = 0; worker < workers[number]; worker++)); do echo {host}; done",
        'done > "$SLURM_HOSTFILE"',
        shlex.join([*step, job.python(sys.executable), *job.words]),
        "",
    ])  # fmt: skip


def _ssh(job: _Job) -> str:
    """Each host's command, fed with a line a second: without these it ends there, as a run of `train --nodes` does."""
    from stagewright.runtime.launch.ssh import OverSsh

    if not job.hosts:
        raise UsageError("the hosts are not named", "add --nodes host1,host2")
    hosts = OverSsh(job.hosts, job.python(sys.executable))
    leash = [hosts.python, "-m", "stagewright.runtime.launch.leash", str(job.config.settings.timeout_s)]
    return "\n".join([
        "#!/bin/bash",
        f"# {job.spread}. When this ends, or one of the hosts, so do the others.",
        "set -e",
        "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
        *(
            f"while sleep 1; do echo; done | {shlex.join(each)} &"
            for each in hosts.commands(job.words, job.workers, before=leash)
        ),
        *["wait -n"] * len(job.workers),
        "",
    ])  # fmt: skip


def _kubernetes(job: _Job) -> str:
    """A JobSet with a job of one pod for each host: these may ask for unlike numbers of cards."""
    _need_volume(job)
    hosts = [_host_job(job, number) for number in range(len(job.workers))]
    again = {"failurePolicy": {"maxRestarts": job.config.job.max_restarts}} if job.config.job.max_restarts else {}
    return _as_yaml({
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": job.name},
        "spec": {**again, "replicatedJobs": hosts},
    })  # fmt: skip


def _host_job(job: _Job, number: int) -> dict[str, Any]:
    from stagewright.runtime.launch.ssh import torchrun

    # A pod is found as JOBSET-JOB-INDEX-INDEX.JOBSET.
    first, workers = f"{job.name}-host-0-0-0.{job.name}", job.workers[number]
    cards = -(-workers // job.config.where.share) if job.cards else 0
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = {"shm": "/dev/shm"}
    container: dict[str, Any] = {
        "name": "workers", "image": job.own.image,
        "command": [*torchrun(job.python("python"), len(job.workers), number, workers, first), *job.words],
        **({"resources": {"limits": {"nvidia.com/gpu": cards}}} if cards else {}),
    }  # fmt: skip
    if job.own.volume is not None:
        mounts["shared"] = container["workingDir"] = _HERE
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": job.own.volume}})
    container["volumeMounts"] = [{"name": name, "mountPath": path} for name, path in mounts.items()]
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": _NOTICE_S, "containers": [container],
        **({"nodeSelector": {"kubernetes.io/hostname": job.hosts[number]}} if job.hosts else {}), "volumes": volumes,
    }  # fmt: skip
    spec = {
        "parallelism": 1, "completions": 1, "completionMode": "Indexed", "backoffLimit": 0, "template": {"spec": pod},
    }  # fmt: skip
    return {"name": f"host-{number}", "template": {"spec": spec}}


def _skypilot(job: _Job) -> str:
    from stagewright.runtime.launch.ssh import torchrun

    _need_volume(job)
    if job.cards and job.own.accelerator is None:
        raise UsageError(
            "what kind of cards SkyPilot is to find is not given", "add --accelerator H100, or --device cpu"
        )
    cards = {"accelerators": f"{job.own.accelerator}:{job.cards}"} if job.cards else {"cpus": f"{max(job.workers)}+"}
    task = {
        "name": job.name, "num_nodes": len(job.workers), "resources": cards,
        **({"volumes": {_HERE: job.own.volume}} if job.own.volume else {}), "setup": "pip install stagewright",
    }  # fmt: skip
    number, first = "$SKYPILOT_NODE_RANK", '$(head -n1 <<< "$SKYPILOT_NODE_IPS")'
    run = torchrun(job.python("python"), len(job.workers), number, f"${{workers[{number}]}}", first)
    return _as_yaml(task) + "\n".join([
        f"# {job.spread}. Every host gets as many cards as the one that needs most.",
        "run: |",
        *([f"  cd {_HERE}"] if job.own.volume else []),
        f"  workers=({' '.join(map(str, job.workers))})",
        f"  {' '.join(run)} {shlex.join(job.words)}",
        "",
    ])  # fmt: skip


def _as_yaml(plain: object) -> str:
    """YAML in which a word such as `off` or `2:1` remains one for readers of YAML 1.1 too."""
    return yaml.safe_dump(plain, sort_keys=False, width=110)


def _need_volume(job: _Job) -> None:
    if job.own.volume is None and len(job.workers) > 1:
        raise UsageError("several hosts need a volume that all of them see", "name it with --volume")


_WRITERS: Mapping[str, Callable[[_Job], str]] = {
    "slurm": _slurm, "kubernetes": _kubernetes, "ssh": _ssh, "skypilot": _skypilot,
}  # fmt: skip
