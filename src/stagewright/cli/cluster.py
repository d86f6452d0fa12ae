"""`stagewright cluster`: read, detect, measure and draw the hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field
from rich.console import Console

from stagewright.cli.options import takes
from stagewright.cli.show import fitted
from stagewright.cluster import Cluster
from stagewright.errors import UsageError
from stagewright.profiling.detect import cluster_or_here, cpu_cluster, read_topology
from stagewright.profiling.drawing import draw_cluster
from stagewright.profiling.kinds import find_kind
from stagewright.schema import dump_json, read_text, schema


@schema(error=UsageError)
class _Drawing:
    topology: tuple[Path, ...] = ()
    """what `nvidia-smi topo -m` prints: one file a host"""
    import_: Path | None = None
    """a CSV of messages: from,to,bytes,seconds"""
    device: str | None = None
    """with --topology or --import: the kind of every GPU, such as v100"""
    rate: tuple[str, ...] = ()
    """with --topology: SYS=3.5e9, in bytes/s"""
    decode: float | None = None
    """with --topology: images a host decodes a second"""
    name: str | None = None
    """the cluster's name"""
    workers: int | None = Field(default=None, ge=1)
    """workers on this machine's CPUs, instead of its GPUs"""
    measure: bool = False
    """measure link rates between running workers, and what a step costs CPU workers"""
    list: bool = False
    """the ready-made clusters"""
    json: bool = False
    """print the cluster as JSON"""
    out: Path | None = None
    """save the cluster here (.yaml or .json)"""


@takes()
def cluster(
    which: Annotated[
        str | None, typer.Argument(metavar="[CLUSTER]", help="a cluster file or name; this machine when left out")
    ] = None,
    *, own: _Drawing,
) -> None:  # fmt: skip
    """Draw a cluster; read one from topology text, detect this machine, or measure its links.

    Example: stagewright cluster --topology topo.txt --device v100 --rate net=11e9 -o mine.yaml
    """
    if own.list:
        for each in Cluster.ready_made():
            typer.echo(each)
        return
    made = _load(which, own)
    if own.measure:
        from stagewright.profiling.links import measure_links

        made = measure_links(made)
        if made.hosts[0].devices[0].kind == "cpu":
            from stagewright.training.overhead import measure_step_overhead

            made = measure_step_overhead(made)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in (dump_json(made.to_dict()) if own.json else draw_cluster(made)).splitlines():
        console.print(*([line] if own.json else fitted(line, console)), sep="\n")
    if own.out is not None:
        made.save(own.out)
        typer.echo(f"saved {own.out}", err=own.json)


def _load(which: str | None, own: _Drawing) -> Cluster:
    if own.import_ is not None:
        from stagewright.profiling.tables import import_links

        if own.device is None:
            raise UsageError("a table of links does not say what its devices are", "add --device KIND, such as v100")
        return import_links(own.import_, find_kind(own.device).device(), name=own.name)
    if own.topology:
        if which is not None or own.workers is not None:
            raise UsageError("--topology describes a cluster by itself", "leave the cluster and --workers out")
        if own.device is None:
            raise UsageError("the topology does not say what its GPUs are", "add --device KIND, such as v100")
        texts, device, name = map(read_text, own.topology), find_kind(own.device).device(), own.topology[0].stem
        rates = dict(map(_read_rate, own.rate))
        return read_topology(list(texts), device, name=own.name or name, rates=rates, decode_images_per_s=own.decode)
    if own.device or own.rate or own.decode is not None:
        raise UsageError("--device, --rate and --decode go with --topology", "edit the cluster file instead")
    if own.workers is None:
        return cluster_or_here(which)
    if which is not None:
        raise UsageError(f"--workers counts workers on this machine, not on {which}", "leave one of them out")
    return cpu_cluster(own.workers, own.name or "local")


def _read_rate(text: str) -> tuple[str, float]:
    """`SYS=3.5e9` as a class and bytes a second."""
    key, _, value = text.partition("=")
    try:
        return key, float(value)
    except ValueError:
        raise UsageError(f"--rate {text}: expected a class and bytes a second, such as SYS=3.5e9") from None
