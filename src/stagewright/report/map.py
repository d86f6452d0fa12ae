"""The cluster as a drawing: a picture a host, its devices above the junctions that join them.

┌0:0┐ ┌0:1┐ ┌0:2┐ ┌0:3┐
  └──┬──┘     └──┬──┘
  switch0     switch1
     └─────┬─────┘
          nic ── net
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from markupsafe import Markup

from stagewright.cluster import Cluster, Host, Link
from stagewright.report.figures import size


class _Layout(NamedTuple):
    """Sizes of the drawing, in pixels."""

    width: int = 52
    height: int = 40
    """Of a device."""
    column: int = 62
    level: int = 62
    margin: int = 14
    per_row: int = 8


_AT = _Layout()


class _Spot(NamedTuple):
    """Where a node's middle stands."""

    x: float
    y: float


def draw_map(cluster: Cluster) -> dict[str, Any]:
    """A drawing for each host, and the words beside them; a device has its name in `data-device`, for its stages."""
    return {
        "name": cluster.name, "hosts": [_draw_host(host, number) for number, host in enumerate(cluster.hosts)],
        "links": [f"{link.ends[0]} – {link.ends[1]}: {link.kind} {_rate_text(link)}" for link in cluster.links],
        "notes": cluster.notes,
    }  # fmt: skip


def _draw_host(host: Host, number: int) -> dict[str, Any]:
    """One host: devices in rows, junctions beneath them, lines for links."""
    spots = _place(host)
    width = max(spot.x for spot in spots.values()) + _AT.width / 2 + _AT.margin
    height = max(spot.y for spot in spots.values()) + _AT.height / 2 + _AT.margin
    shape = f"width:min(100%,{width:.0f}px);min-width:min({width:.0f}px,26rem)"
    parts = [f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="{shape}" role="img">']
    parts.append(f"<title>host {number}</title>")
    parts += (_draw_link(link, spots) for link in host.links)
    parts += (_draw_node(name, spot, number) for name, spot in spots.items())
    title = f"host {number}" + (f" · {host.address}" if host.address else "")
    # The drawing escapes what it holds.
    return {"title": title, "svg": Markup("".join([*parts, "</svg>"])), "facts": list(_host_facts(host))}


def _place(host: Host) -> dict[str, _Spot]:
    """A spot for each device, eight to a row, and junction: one stands as deep as its links are from the devices."""
    spots = {}
    for index in range(len(host.devices)):
        row, column = divmod(index, _AT.per_row)
        x, y = _AT.margin + _AT.width / 2 + _AT.column * column, _AT.margin + _AT.height / 2 + (_AT.height + 16) * row
        spots[str(index)] = _Spot(x, y)
    base = max(spot.y for spot in spots.values())
    for level, names in enumerate(_levels(host), start=1):
        free, placed = 0.0, {}
        for x, name in sorted((_middle(name, host.links, spots), name) for name in names):
            placed[name] = _Spot(max(x, free), base + _AT.level * level)
            free = placed[name].x + _AT.column
        spots |= placed
    return spots


def _levels(host: Host) -> Iterator[list[str]]:
    """The junctions, by how many links they are away from the nearest device."""
    known = {str(index) for index in range(len(host.devices))}
    edges = [link.ends for link in host.links]
    while True:
        near = {b if a in known else a for a, b in edges if (a in known) != (b in known)}
        if not near:
            break
        known |= near
        yield sorted(near)
    lost = {end for ends in edges for end in ends} - known
    if lost:
        yield sorted(lost)


def _middle(name: str, links: Sequence[Link], spots: dict[str, _Spot]) -> float:
    """The mean place of a junction's neighbours that already stand."""
    ends = [link.ends for link in links if name in link.ends]
    near = [spots[a if b == name else b].x for a, b in ends if (a if b == name else b) in spots]
    return sum(near) / len(near) if near else _AT.margin + _AT.width / 2


def _draw_link(link: Link, spots: dict[str, _Spot]) -> str:
    """A line between two nodes, or an arc above two devices; thicker where the link is faster."""
    first, second = (spots[end] for end in link.ends)
    thick = 1.0 if link.bytes_per_s < 2e9 else 1.8 if link.bytes_per_s < 2e10 else 2.8
    title = f"<title>{escape(link.kind)}, {_rate_text(link)}</title>"
    shape = f"M{first.x:.1f} {first.y:.1f}L{second.x:.1f} {second.y:.1f}"
    if first.y == second.y:
        lift = _AT.height / 2 + 10
        shape = f"M{first.x:.1f} {first.y:.1f}Q{(first.x + second.x) / 2:.1f} {first.y - 2 * lift:.1f} "
        shape += f"{second.x:.1f} {second.y:.1f}"
    return f'<path class="wire" stroke-width="{thick}" d="{shape}">{title}</path>'


def _draw_node(name: str, spot: _Spot, host: int) -> str:
    if not name.isdecimal():
        width = max(7.2 * len(name) + 14, 34)
        box = f'x="{spot.x - width / 2:.1f}" y="{spot.y - 10:.1f}" width="{width:.1f}" height="20" rx="10"'
        return f'<rect class="junction" {box}/><text class="small" x="{spot.x:.1f}" y="{spot.y + 4:.1f}">{name}</text>'
    left, top = spot.x - _AT.width / 2, spot.y - _AT.height / 2
    return (
        f'<g class="device" data-device="{host}:{name}" transform="translate({left:.1f} {top:.1f})">'
        f'<rect class="box" width="{_AT.width}" height="{_AT.height}" rx="6"/><g class="stages"></g>'
        f'<text x="{_AT.width / 2}" y="17">{host}:{name}</text><text class="small stage-name" '
        f'x="{_AT.width / 2}" y="32"></text></g>'
    )


def _host_facts(host: Host) -> Iterator[str]:
    """`8 × TITAN V, 11.8 GiB` for each kind of device; `PCIe 12.0 GB/s` for each kind of link."""
    kinds = [(device.kind, device.memory_bytes) for device in host.devices]
    for kind, memory in dict.fromkeys(kinds):
        yield f"{kinds.count((kind, memory))} × {kind}, {size(memory)}"
    yield from dict.fromkeys(f"{link.kind} {_rate_text(link)}" for link in host.links)


def _rate_text(link: Link) -> str:
    """`12.0 GB/s`, `125 MB/s`: decimal, as network and bus rates are told."""
    giga = link.bytes_per_s / 1e9
    return f"{giga:.1f} GB/s" if giga >= 1 else f"{giga * 1e3:.0f} MB/s"
