"""A cluster as text: each host a tree of its wires, then what crosses the tree, then the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from stagewright.cluster import Cluster, Device, Host, Link, count


def draw_cluster(cluster: Cluster) -> str:
    """The drawing that `stagewright cluster FILE` prints.

    host 0   2 × titan-v, 11.8 GiB
      cpu0
      └─ 11.0 GB/s PHB ─ switch0
         ├─ 12.0 GB/s PIX ─ 0:0
         └─ 12.0 GB/s PIX ─ 0:1
    """
    lines = [f"{cluster.name}: {count(len(cluster.hosts), 'host')}, {count(len(cluster.device_ids), 'device')}"]
    for first, last, host in _alike(cluster.hosts):
        title = f"host {first}" if first == last else f"hosts {first} to {last}, each"
        rate = host.decode_images_per_s
        decoding = "" if rate is None else f", decodes {rate:,.0f} images/s"
        lines += ["", f"{title}   {describe_devices(host.devices)}{decoding}"]
        lines += [f"  {line}" for line in _draw_host(host, first)]
    wide = _by_kind(cluster.links, lambda link: f"{_rate(link)}, {link.latency_s * 1e6:.3g} µs")
    lines += ["", *(f"network   {name}: {pairs}" for name, pairs in wide.items())] if wide else []
    lines += ["", *cluster.notes] if cluster.notes else []
    return "\n".join(lines) + "\n"


def _alike(hosts: Sequence[Host]) -> Iterator[tuple[int, int, Host]]:
    """Runs of equal hosts, as (first, last, host)."""
    start = 0
    for _, run in groupby(hosts, key=lambda host: (host.devices, host.links, host.decode_images_per_s)):
        members = list(run)
        yield start, start + len(members) - 1, members[0]
        start += len(members)


def describe_devices(devices: Sequence[Device]) -> str:
    """`2 × v100, 15.8 GiB + 1 × titan-v, 11.8 GiB, speed 0.9`."""
    parts = []
    for device in dict.fromkeys(devices):
        text = f"{sum(other == device for other in devices)} × {device.kind}, {device.memory_bytes / 2**30:.1f} GiB"
        parts.append(text + (f", speed {device.speed:g}" if device.speed != 1 else ""))
    return " + ".join(parts)


def _draw_host(host: Host, number: int) -> list[str]:
    """The wires of a host as a tree from its first CPU, then the wires that the tree leaves out."""
    table: dict[str, list[tuple[str, Link]]] = {}
    for link in host.links:
        for here, there in (link.ends, link.ends[::-1]):
            table.setdefault(here, []).append((there, link))
    roots = [name for name in ("cpu0", *table) if name in table and not name.isdecimal()][:1] or list(table)[:1]
    drawn: set[int] = set()
    lines = [line for root in roots for line in (_label(root, number), *_branches(root, table, {root}, drawn, number))]
    rest = _by_kind((link for link in host.links if id(link) not in drawn), _rate)
    return lines + [f"{name} between {pairs}" for name, pairs in sorted(rest.items())]


def _branches(
    node: str, table: Mapping[str, list[tuple[str, Link]]], seen: set[str], drawn: set[int], number: int
) -> list[str]:
    # devices end a branch: what hangs on them is a wire of their own, drawn below the tree
    if node.isdecimal():
        return []
    below = [(there, link) for there, link in table.get(node, ()) if there not in seen]
    seen.update(there for there, _ in below)
    lines: list[str] = []
    for place, (there, link) in enumerate(below):
        drawn.add(id(link))
        last = place == len(below) - 1
        lines.append(f"{'└' if last else '├'}─ {_rate(link)} ─ {_label(there, number)}")
        pad = "   " if last else "│  "
        lines += [pad + line for line in _branches(there, table, seen, drawn, number)]
    return lines


def _label(node: str, host: int) -> str:
    return f"{host}:{node}" if node.isdecimal() else node


def _rate(link: Link) -> str:
    """`12.0 GB/s PIX`."""
    return f"{link.bytes_per_s / 1e9:.3g} GB/s {link.kind}"


def _by_kind(links: Iterable[Link], called: Callable[[Link], str]) -> dict[str, str]:
    """The ends of all links that are called alike."""
    groups: dict[str, list[str]] = {}
    for link in links:
        groups.setdefault(called(link), []).append("–".join(link.ends))
    return {name: ", ".join(pairs) for name, pairs in groups.items()}
