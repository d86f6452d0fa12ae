"""Hardware as clusters: this machine's GPUs, else its CPUs; and hosts from the text that `nvidia-smi topo -m` prints.

The table names for each pair the worst crossing between them; a tree of junctions gives the same crossings:

    GPU0 ─ switch0 ─ cpu0 ─ cpu1 ─ switch2 ─ GPU4        PIX under one switch, PHB under one cpu, SYS between cpus
    GPU1 ─┘         ┌─┘
    GPU2 ─ switch1 ─┘       NV#: a wire of its own, # × the rate of one NVLink
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from stagewright.cluster import Cluster, Device, Host, Link, count, find_cluster, make_cluster
from stagewright.errors import ClusterError
from stagewright.profiling.kinds import find_kind, kind_called, plain_name, relative_speed


class _LinkClass(NamedTuple):
    """What one class of link carries in each direction, where nothing was measured."""

    bytes_per_s: float
    latency_s: float


_LINK_CLASSES: Mapping[str, _LinkClass] = {
    "PIX": _LinkClass(12e9, 1e-6),  # PCIe 3.0 ×16: 15.75 GB/s on the wire, about 12 GB/s of payload
    "PXB": _LinkClass(12e9, 1e-6),
    "PHB": _LinkClass(11e9, 1e-6),
    "NODE": _LinkClass(10e9, 1e-6),
    "SYS": _LinkClass(8e9, 2e-6),  # through QPI or UPI
    "NV": _LinkClass(22e9, 1e-6),  # one NVLink: 25 GB/s on the wire
    "net": _LinkClass(1.15e9, 1e-5),  # 10 Gb/s Ethernet
}
_IMAGES_PER_S_A_THREAD = 215.0
"""JPEG images of ImageNet's size decoded and cropped a second by one hardware thread of a 2017 server CPU."""

_RANKS: Mapping[str, int] = {"X": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}
"""The classes from the tightest to the widest."""
_JUNCTIONS: Mapping[str, str] = {"PIX": "switch", "PXB": "tree", "PHB": "bridge", "NODE": "node", "SYS": "root"}
"""What a junction is called whose members meet at a class."""
_Asker = Callable[[Sequence[str]], str | None]


def ask(command: Sequence[str]) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def cluster_or_here(name_or_file: str | None) -> Cluster:
    """The cluster of this name or file; where none is given, this machine."""
    return detect_cluster() if name_or_file is None else find_cluster(name_or_file)


def detect_cluster(num_devices: int | None = None, ask: _Asker = ask) -> Cluster:
    """The machine's GPUs and their wires; without GPUs, its CPU cores as `num_devices` workers."""
    listing = ask(("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))
    if listing is None or not listing.strip():
        return cpu_cluster(num_devices or num_cores())
    devices, topology = read_gpus(listing), ask(("nvidia-smi", "topo", "-m"))
    notes = ("detected by nvidia-smi; rates are defaults by link class until measured",)
    if topology is not None and len(devices) > 1:
        return read_topology([topology], devices, name="local", notes=notes, where="nvidia-smi topo -m")
    rates = _LINK_CLASSES["PHB"]._asdict()
    links = (Link(ends=(str(number), "cpu0"), kind="PHB", **rates) for number in range(len(devices)))
    return Cluster(name="local", hosts=(_host(devices, tuple(links)),), notes=notes)


def read_gpus(listing: str) -> tuple[Device, ...]:
    """The devices in the lines `name, MiB` that nvidia-smi prints; speeds stand against the first one's."""
    devices: list[Device] = []
    reference = None
    for number, line in enumerate(listing.strip().splitlines(), 1):
        name, _, memory = line.rpartition(",")
        if not name or not memory.strip().isdecimal():
            raise ClusterError(f"nvidia-smi, line {number}: {line!r}: expected a name and MiB of memory")
        kind = kind_called(name)
        reference = reference or kind
        devices.append(
            Device(
                kind=plain_name(name),
                memory_bytes=int(memory) << 20,
                speed=relative_speed(kind, reference) if kind and reference else 1.0,
                framework_bytes=kind.framework_bytes if kind else 600 << 20,  # a CUDA context with its libraries
            )
        )
    return tuple(devices)


def cpu_cluster(num_devices: int, name: str = "local") -> Cluster:
    """One host whose workers are processes on its CPUs; they share its memory evenly."""
    memory = max(1, memory_bytes() // num_devices)
    device = Device(kind="cpu", memory_bytes=memory, framework_bytes=find_kind("cpu").framework_bytes)
    # 2 GB/s and 0.1 ms between two processes over the loopback device, as gloo moves tensors
    made = make_cluster(num_devices, name=name, device=device, bytes_per_s=2e9, latency_s=1e-4)
    host = _host(made.hosts[0].devices, made.hosts[0].links)
    return Cluster(name=name, hosts=(host,), notes=("CPU workers; rates are those of gloo over loopback",))


def _host(devices: tuple[Device, ...], links: tuple[Link, ...]) -> Host:
    return Host(devices=devices, links=links, decode_images_per_s=num_cores() * _IMAGES_PER_S_A_THREAD)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory, or the least limit of the control groups that this process is in."""
    limits, groups = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")], Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, kinds, path = line.split(":", 2)
        folder, name = ("memory", "memory.limit_in_bytes") if kinds == "memory" else ("", "memory.max")
        if kinds in ("", "memory"):  # a container may see its own group as the root of all
            for place in (folder + path, folder):
                with suppress(OSError, ValueError):
                    limits.append(int(Path("/sys/fs/cgroup", place.lstrip("/"), name).read_text()))
    return min(limits)


# ── the text of a topology ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class _Table:
    """One host's table: GPUs first, then network cards."""

    names: tuple[str, ...]
    cells: Mapping[tuple[str, str], str]
    """The class between each two of them, or NV#."""
    affinity: Mapping[str, str]
    classes: Mapping[str, _LinkClass]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name.startswith("GPU"))

    @property
    def nics(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if not name.startswith("GPU"))

    def node(self, name: str) -> str:
        """One of them as a node of the host: `3` for GPU3, `nic`, `nic1` … for network cards."""
        if name.startswith("GPU"):
            return str(self.gpus.index(name))
        return f"nic{self.nics.index(name) or ''}"

    def link(self, first: str, second: str, kind: str) -> Link:
        return _link(first, second, kind, self.classes)


def _parse_table(text: str, where: str, classes: Mapping[str, _LinkClass]) -> _Table:
    """The table in the text that `nvidia-smi topo -m` prints; a damaged one is refused with its line."""
    lines = [
        (number, words) for number, line in enumerate(text.splitlines(), 1) if (words := without_colours(line).split())
    ]
    if not lines or not lines[0][1][0].startswith("GPU"):
        raise ClusterError(f"{where}, line 1: expected the header GPU0 GPU1 …", "give what `nvidia-smi topo -m` prints")
    header = lines[0][1]
    names = tuple(header[: next((n for n, word in enumerate(header) if word in ("CPU", "NUMA")), len(header))])
    rows: dict[str, tuple[int, list[str]]] = {}
    for number, words in lines[1:]:
        if words[0] == "Legend:":
            break
        if words[0] not in names:
            raise ClusterError(f"{where}, line {number}: row {words[0]!r} is no column of the header")
        rows[words[0]] = (number, words[1:])
    cells: dict[tuple[str, str], str] = {}
    for name in names:
        _read_row(name, names, rows, cells, where)
    affinity = {name: words[len(names)] for name, (_, words) in rows.items() if len(words) > len(names)}
    return _Table(names=names, cells=cells, affinity=affinity, classes=classes)


def without_colours(text: str) -> str:
    """What nvidia-smi prints, without what underlines its header on a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _read_row(
    name: str, names: Sequence[str], rows: Mapping[str, tuple[int, list[str]]], cells: dict[tuple[str, str], str],
    where: str,
) -> None:  # fmt: skip
    """Adds a row to the cells, in which those above it are."""
    if name not in rows:
        raise ClusterError(f"{where}: column {name} has no row: the table is not square")
    number, words = rows[name]
    here = f"{where}, line {number}"
    if len(words) < len(names):
        raise ClusterError(f"{here}: row {name} has {len(words)} of {len(names)} entries: the table is not square")
    for other, word in zip(names, words):
        if word not in _RANKS and not re.fullmatch(r"NV[1-9]\d?", word):
            known = f"known: {', '.join(_RANKS)}, and NV1, NV2 …"
            raise ClusterError(f"{here}: row {name} holds the unknown link class {word!r}", known)
        back = cells.get((other, name), word)
        if back != word:
            raise ClusterError(f"{here}: {name} to {other} is {word}, but {other} to {name} is {back}")
        cells[name, other] = word


def _num_threads(affinity: str) -> int:
    """How many hardware threads `0-13,28-41` names."""
    found = re.findall(r"(?:^|,)(\d{1,6})(?:-(\d{1,6}))?(?=,|$)", affinity, re.ASCII)
    return sum(int(last or first) - int(first) + 1 for first, last in found)


def _nvlinks(table: _Table) -> Iterator[Link]:
    """One wire a pair; or one wire a GPU to the switch, where every pair has all the links of its GPUs."""
    pairs = {(a, b): table.cells[a, b] for a, b in combinations(table.gpus, 2)}
    counts = {int(cell[2:]) if cell.startswith("NV") else 0 for cell in pairs.values()}
    if len(table.gpus) > 2 and len(counts) == 1 and 0 not in counts:
        for gpu in table.gpus:
            yield table.link(table.node(gpu), "nvswitch", f"NV{min(counts)}")
        return
    for (first, second), cell in pairs.items():
        if cell.startswith("NV"):
            yield table.link(table.node(first), table.node(second), cell)


def _pci_links(table: _Table) -> Iterator[Link]:
    """The tree of PCIe switches, host bridges and sockets that the table's classes describe."""
    sockets = _grouped(table, table.names, "NODE")
    junctions: Counter[str] = Counter()
    for number, socket in enumerate(sockets):
        kind = "PHB" if len(_grouped(table, socket, "PHB")) == 1 else "NODE"
        yield from _below(table, socket, f"cpu{number}", kind, junctions)
    for first, second in combinations(range(len(sockets)), 2):
        yield table.link(f"cpu{first}", f"cpu{second}", "SYS")
    if not table.nics:
        yield table.link("cpu0", "nic", "PHB")


def _below(table: _Table, names: Sequence[str], parent: str, kind: str, junctions: Counter[str]) -> Iterator[Link]:
    """The links under a junction whose members meet by crossing `kind`; those that meet below it share a junction."""
    tighter = next(name for name, rank in _RANKS.items() if rank == _RANKS[kind] - 1)
    for group in _grouped(table, names, tighter):
        if len(group) == 1:
            yield table.link(table.node(group[0]), parent, kind)
            continue
        cells = {table.cells[pair] for pair in combinations(group, 2)}
        inner = max(cells & _RANKS.keys(), key=lambda cell: _RANKS[cell])
        word = _JUNCTIONS[inner]
        node = f"{word}{junctions[word]}"
        junctions[word] += 1
        yield from _below(table, group, node, inner, junctions)
        yield table.link(node, parent, kind)


def _grouped(table: _Table, names: Sequence[str], level: str) -> list[tuple[str, ...]]:
    """Those of the names that meet at this class or a tighter one, together, in the table's order.

    NVLink hides the PCIe class of a pair; GPUs next to the same CPU cores are then taken to share its socket.
    """
    groups: list[set[str]] = [{name} for name in names]
    for first, second in combinations(names, 2):
        if _meets(table, first, second, level):
            one, other = (next(group for group in groups if name in group) for name in (first, second))
            if one is not other:
                one |= other
                groups.remove(other)
    return [tuple(name for name in names if name in group) for group in groups]


def _meets(table: _Table, first: str, second: str, level: str) -> bool:
    cell = table.cells[first, second]
    if cell in _RANKS:
        return _RANKS[cell] <= _RANKS[level]
    near = table.affinity.get(first)
    return level == "NODE" and (near is None or near == table.affinity.get(second))


def _link(first: str, second: str, kind: str, classes: Mapping[str, _LinkClass]) -> Link:
    many = int(kind[2:]) if kind.startswith("NV") else 1
    known = classes["NV" if kind.startswith("NV") else kind]
    return Link(ends=(first, second), kind=kind, bytes_per_s=known.bytes_per_s * many, latency_s=known.latency_s)


def join_hosts(
    hosts: Sequence[Host], name: str, classes: Mapping[str, _LinkClass] = _LINK_CLASSES, notes: Sequence[str] = ()
) -> Cluster:
    """The hosts on one network: every network card is wired to the junction `net`."""
    wide = []
    for number, host in enumerate(hosts if len(hosts) > 1 else ()):
        cards = sorted({end for link in host.links for end in link.ends if end.startswith("nic")})
        wide += [_link(f"{number}:{card}", "net", "net", classes) for card in cards]
    return Cluster(name=name, hosts=tuple(hosts), links=tuple(wide), notes=tuple(notes))


def read_topology(
    texts: Sequence[str], device: Device | Sequence[Device], *, name: str = "cluster",
    rates: Mapping[str, float] | None = None, decode_images_per_s: float | None = None, notes: Sequence[str] = (),
    where: str = "the topology of host {}",
) -> Cluster:  # fmt: skip
    """The cluster of one table a host; `device` is what each GPU is, or one host's devices in order."""
    if not texts:
        raise ClusterError("no topology was given", "give what `nvidia-smi topo -m` prints, one text a host")
    classes = dict(_LINK_CLASSES)
    for key, rate in (rates or {}).items():
        if key not in classes or not 0 < rate < float("inf"):
            raise ClusterError(
                f"rate {key}={rate}: expected bytes a second for one of {', '.join(_LINK_CLASSES)}",
                "write it like SYS=3.5e9",
            )
        classes[key] = classes[key]._replace(bytes_per_s=rate)
    hosts = []
    for number, text in enumerate(texts):
        table = _parse_table(text, where.format(number), classes)
        devices = (device,) * len(table.gpus) if isinstance(device, Device) else tuple(device)
        if len(devices) != len(table.gpus):
            raise ClusterError(f"the table has {count(len(table.gpus), 'GPU')}, but {len(devices)} devices are given")
        threads = sum(map(_num_threads, set(table.affinity.values())))
        decoded = threads * _IMAGES_PER_S_A_THREAD or None if decode_images_per_s is None else decode_images_per_s
        links = (*_nvlinks(table), *_pci_links(table))
        hosts.append(Host(devices=devices, links=links, decode_images_per_s=decoded))
    return join_hosts(hosts, name, classes, notes)
