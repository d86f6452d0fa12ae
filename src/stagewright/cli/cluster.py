"""`stagewright cluster`: read, detect, measure and draw the hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cluster import Cluster, ready_made_clusters
from stagewright.errors import FileError, UsageError
from stagewright.profiling.detect import cluster_or_here, cpu_cluster
from stagewright.profiling.drawing import draw_cluster
from stagewright.profiling.kinds import find_kind
from stagewright.profiling.topology import read_topology
from stagewright.schema import dump_json


def cluster(
    which: Annotated[
        str | None, typer.Argument(metavar="[CLUSTER]", help="A cluster file or name; this machine when left out.")
    ] = None,
    topology: Annotated[
        list[Path] | None, typer.Option(help="What `nvidia-smi topo -m` prints: one file a host.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="With --topology: the kind of every GPU, such as v100.")] = None,
    rate: Annotated[list[str] | None, typer.Option(help="With --topology: SYS=3.5e9, in bytes/s; repeat it.")] = None,
    decode: Annotated[float | None, typer.Option(help="With --topology: images a host decodes a second.")] = None,
    name: Annotated[str | None, typer.Option(help="The cluster's name.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers on this machine's CPUs, instead of its GPUs.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure link rates between running workers.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="The ready-made clusters.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cluster as JSON.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the cluster here (.yaml or .json).")] = None,
) -> None:
    """Draw a cluster; read one from topology text, detect this machine, or measure its links.

    Example: stagewright cluster --topology topo.txt --device v100 --rate net=11e9 -o mine.yaml
    """
    if list_all:
        for each in ready_made_clusters():
            typer.echo(each)
        return
    made = _load(which, topology or [], device, rate or [], decode, name, workers)
    if measure:
        from stagewright.profiling.links import measure_links

        made = measure_links(made)
    typer.echo(dump_json(made.to_dict()) if as_json else draw_cluster(made), nl=False)
    if out is not None:
        made.save(out)
        typer.echo(f"saved {out}", err=as_json)


def _load(
    which: str | None,
    topology: list[Path],
    device: str | None,
    rate: list[str],
    decode: float | None,
    name: str | None,
    workers: int | None,
) -> Cluster:
    """The cluster that the options ask for."""
    if topology:
        if which is not None or workers is not None:
            raise UsageError("--topology describes a cluster by itself", "leave the cluster and --workers out")
        if device is None:
            raise UsageError("the topology does not say what its GPUs are", "add --device KIND, such as v100")
        rates = dict(_read_rate(text) for text in rate)
        texts = [_read_text(path) for path in topology]
        kind = find_kind(device).device()
        return read_topology(texts, kind, name=name or topology[0].stem, rates=rates, decode_images_per_s=decode)
    if device or rate or decode is not None:
        raise UsageError("--device, --rate and --decode go with --topology", "edit the cluster file instead")
    if which is not None and workers is not None:
        raise UsageError(f"--workers counts workers on this machine, not on {which}", "leave one of them out")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is {workers}: expected 1 or more")
    return cpu_cluster(workers, name or "local") if workers is not None else cluster_or_here(which)


def _read_rate(text: str) -> tuple[str, float]:
    """`SYS=3.5e9` as a class and bytes a second."""
    key, _, value = text.partition("=")
    try:
        return key, float(value)
    except ValueError:
        raise UsageError(f"--rate {text}: expected a class and bytes a second, such as SYS=3.5e9") from None


def _read_text(path: Path) -> str:
    """A text file's contents."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise FileError(f"{path}: {getattr(fault, 'strerror', None) or 'not text in UTF-8'}") from None
