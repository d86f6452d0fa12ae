"""Profiles in PipeDream's `graph.txt` format.

    node4 -- Conv2d(…) -- forward_compute_time=3.1, backward_compute_time=5.6, activation_size=…, parameter_size=…
    <TAB>node4 -- node5

Times are milliseconds and sizes bytes, both for one minibatch. `Input*` nodes only load data: their time is no compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from stagewright.errors import FileError, ProfileError
from stagewright.profile import LayerProfile, Profile

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class _Node:
    """One node of the file; times in milliseconds, sizes in bytes of a minibatch."""

    id: str
    description: str
    line: int
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def is_input(self) -> bool:
        return self.description.startswith("Input")


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """Nodes by id, and for each the nodes it reads and the nodes that read it, in the file's order."""

    nodes: Mapping[str, _Node]
    reads: Mapping[str, Collection[str]]
    readers: Mapping[str, Collection[str]]


def import_pipedream(path: str | Path, *, batch: int, model: str | None = None, device: str = "unknown") -> Profile:
    """The profile in a PipeDream file whose minibatch has so many rows."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise FileError(f"{path}: {getattr(fault, 'strerror', None) or 'not text in UTF-8'}") from None
    return read_pipedream(text, batch=batch, model=model or path.stem, device=device, where=path.name)


def read_pipedream(
    text: str, *, batch: int, model: str = "imported", device: str = "unknown", where: str = "the graph"
) -> Profile:
    """The profile that PipeDream's text describes, its layers in an order in which few bytes cross."""
    if batch < 1:
        raise ProfileError(f"the batch is {batch} rows: expected the rows that PipeDream timed, 1 or more")
    graph = _without_unused(parse_graph(text, where))
    order = [id for id in order_nodes(graph, where) if not graph.nodes[id].is_input]
    if not order:
        raise ProfileError(f"{where}: holds no node beside inputs")
    layers = tuple(_layer(graph, id, place, order, batch) for place, id in enumerate(order))
    inputs = [node for node in graph.nodes.values() if node.is_input]
    return Profile(
        model=model,
        device=device,
        source="imported",
        batch_sizes=(batch,),
        layers=layers,
        input_bytes=sum(node.activation_bytes for node in inputs) / batch,
        notes=("imported from PipeDream's format; what is kept for backward is taken to be every layer's output",),
    )


def parse_graph(text: str, where: str = "the graph") -> _Graph:
    """The nodes and edges of the text; what is wrong is named with its line."""
    nodes: dict[str, _Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.strip().split(" -- ")
        if not line.strip():
            continue
        if len(parts) == 2:
            edges.append((number, parts[0], parts[1]))
            continue
        node = _node(parts, number, where)
        if node.id in nodes:
            raise ProfileError(f"{where}, line {number}: {node.id} was already in line {nodes[node.id].line}")
        nodes[node.id] = node
    return _graph(nodes, edges, where)


def _node(parts: Sequence[str], number: int, where: str) -> _Node:
    if len(parts) < 3 or not re.fullmatch(r"node\w+", parts[0]):
        raise ProfileError(
            f"{where}, line {number}: expected `node -- description -- times and sizes`, or `node -- node`"
        )
    fields = dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,\s]+)", parts[2]))
    return _Node(parts[0], parts[1], number, *(_number(fields.get(key), key, number, where) for key in _FIELDS))


def _number(text: str | None, key: str, number: int, where: str) -> float:
    """A value, or the sum of `[a; b]`."""
    if text is None:
        raise ProfileError(f"{where}, line {number}: key {key} is missing")
    try:
        value = sum(float(part) for part in text.strip("[]").split(";") if part.strip())
    except ValueError:
        raise ProfileError(f"{where}, line {number}: key {key} is {text!r}: expected a number") from None
    if not 0 <= value < math.inf:
        raise ProfileError(f"{where}, line {number}: key {key} is {text}: expected a finite number, not below zero")
    return value


def _graph(nodes: dict[str, _Node], edges: Sequence[tuple[int, str, str]], where: str) -> _Graph:
    if not nodes:
        raise ProfileError(f"{where}: holds no node")
    reads: dict[str, dict[str, None]] = {id: {} for id in nodes}
    readers: dict[str, dict[str, None]] = {id: {} for id in nodes}
    for number, source, target in edges:
        for id in (source, target):
            if id not in nodes:
                raise ProfileError(f"{where}, line {number}: the edge names {id!r}, which is no node")
        reads[target][source] = readers[source][target] = None
    graph = _Graph(nodes=nodes, reads=reads, readers=readers)
    _check_connected(graph, where)
    return graph


def _check_connected(graph: _Graph, where: str) -> None:
    first = next(iter(graph.nodes))
    seen, stack = {first}, [first]
    while stack:
        id = stack.pop()
        fresh = [other for other in (*graph.reads[id], *graph.readers[id]) if other not in seen]
        seen.update(fresh)
        stack += fresh
    lost = next((node for id, node in graph.nodes.items() if id not in seen), None)
    if lost is not None:
        raise ProfileError(
            f"{where}, line {lost.line}: {lost.id} is not connected with {first}: the graph falls apart",
            "add the missing edges, or import each part on its own",
        )


def _without_unused(graph: _Graph) -> _Graph:
    """The graph without the picked-out parts of results (`__getitem__`) that nothing reads."""
    unused = {
        id
        for id, node in graph.nodes.items()
        if node.description.startswith("__getitem__") and not graph.readers[id] and len(graph.nodes) > 1
    }
    kept = {id: node for id, node in graph.nodes.items() if id not in unused}
    readers = {id: tuple(other for other in graph.readers[id] if other not in unused) for id in kept}
    return _Graph(nodes=kept, reads={id: graph.reads[id] for id in kept}, readers=readers)


def order_nodes(graph: _Graph, where: str = "the graph") -> list[str]:
    """The nodes so that each comes after what it reads; of those that may come next, the one after which least crosses.

    a ─▶ b ─▶ d      a branch is finished before the next one begins, because leaving it open would carry its
    └──▶ c ──┘       tensors along:  a b c d
    """
    sorter = TopologicalSorter(graph.reads)
    try:
        sorter.prepare()
    except CycleError as fault:
        stuck = min((graph.nodes[id] for id in fault.args[1]), key=lambda node: node.line)
        raise ProfileError(
            f"{where}, line {stuck.line}: {stuck.id} waits for itself: the graph has a cycle", "remove the edge back"
        ) from None
    open_readers = {id: len(readers) for id, readers in graph.readers.items()}
    order, ready = [""], list(sorter.get_ready())
    while ready:
        ready.remove(best := min(ready, key=lambda id: _preference(graph, id, open_readers, order[-1])))
        order.append(best)
        for source in graph.reads[best]:
            open_readers[source] -= 1
        sorter.done(best)
        ready += sorter.get_ready()
    return order[1:]


def _preference(graph: _Graph, id: str, open_readers: Mapping[str, int], before: str) -> tuple[float, bool, int, str]:
    """First what lets the fewest more bytes cross: its output, less what nothing reads any more."""
    made = graph.nodes[id].activation_bytes if graph.readers[id] else 0.0
    freed = (graph.nodes[source].activation_bytes for source in graph.reads[id] if open_readers[source] == 1)
    digits = re.search(r"\d+", id)
    return made - sum(freed), before not in graph.reads[id], int(digits[0]) if digits else 0, id


def _layer(graph: _Graph, id: str, place: int, order: Sequence[str], batch: int) -> LayerProfile:
    node = graph.nodes[id]
    sources = tuple(source for source in graph.reads[id] if not graph.nodes[source].is_input)
    chained = place == 0 or sources == (order[place - 1],)
    return LayerProfile(
        name=id,
        kind=re.split(r"[( ]", node.description)[0] or "layer",
        forward_s=(node.forward_ms / 1e3,),
        backward_s=(node.backward_ms / 1e3,),
        output_bytes=node.activation_bytes / batch,
        saved_bytes=node.activation_bytes / batch,
        parameter_bytes=round(node.parameter_bytes),
        inputs=None if chained else sources,
    )
