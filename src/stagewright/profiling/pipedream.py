"""Profiles in PipeDream's `graph.txt` format.

    node4 -- Conv2d(…) -- forward_compute_time=3.1, backward_compute_time=5.6, activation_size=…, parameter_size=…
    <TAB>node4 -- node5

Times are milliseconds and sizes bytes, both for one minibatch. `Input*` nodes only load data: their time is no compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from stagewright.errors import ProfileError
from stagewright.profile import LayerProfile, Profile
from stagewright.schema import read_text

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
    reads: dict[str, None] = field(default_factory=dict, kw_only=True)
    """The nodes it reads, in the file's order."""
    readers: dict[str, None] = field(default_factory=dict, kw_only=True)

    @property
    def is_input(self) -> bool:
        return self.description.startswith("Input")


_Graph = dict[str, _Node]


def import_pipedream(path: str | Path, *, batch: int, model: str | None = None, device: str = "unknown") -> Profile:
    """The profile in a PipeDream file whose minibatch has so many rows."""
    path = Path(path)
    return read_pipedream(read_text(path), batch=batch, model=model or path.stem, device=device, where=path.name)


def read_pipedream(
    text: str, *, batch: int, model: str = "imported", device: str = "unknown", where: str = "the graph"
) -> Profile:
    """The profile that PipeDream's text describes, its layers in an order in which few bytes cross."""
    if batch < 1:
        raise ProfileError(f"the batch is {batch} rows: expected the rows that PipeDream timed, 1 or more")
    graph = _parse_graph(text, where)
    _drop_unused(graph)
    order = [id for id in _order_nodes(graph, where) if not graph[id].is_input]
    if not order:
        raise ProfileError(f"{where}: holds no node beside inputs")
    return Profile(
        model=model, device=device, source="imported", batch_sizes=(batch,),
        layers=tuple(_layer(graph, id, before, batch) for before, id in zip(["", *order], order)),
        input_bytes=sum(node.activation_bytes for node in graph.values() if node.is_input) / batch,
        notes=("imported from PipeDream's format; what is kept for backward is taken to be every layer's output",),
    )  # fmt: skip


def _parse_graph(text: str, where: str) -> _Graph:
    """The nodes of the text, joined by its edges; what is wrong is named with its line."""
    graph: _Graph = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.strip().split(" -- ")
        if not line.strip():
            continue
        if len(parts) == 2:
            edges.append((number, parts[0], parts[1]))
            continue
        node = _node(parts, number, where)
        if node.id in graph:
            raise ProfileError(f"{where}, line {number}: {node.id} was already in line {graph[node.id].line}")
        graph[node.id] = node
    if not graph:
        raise ProfileError(f"{where}: holds no node")
    for number, source, target in edges:
        for id in (source, target):
            if id not in graph:
                raise ProfileError(f"{where}, line {number}: the edge names {id!r}, which is no node")
        graph[target].reads[source] = graph[source].readers[target] = None
    _check_connected(graph, where)
    return graph


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


def _check_connected(graph: _Graph, where: str) -> None:
    first = next(iter(graph))
    seen, stack = {first}, [first]
    while stack:
        node = graph[stack.pop()]
        fresh = (node.reads.keys() | node.readers.keys()) - seen
        seen |= fresh
        stack += fresh
    lost = next((node for node in graph.values() if node.id not in seen), None)
    if lost is not None:
        raise ProfileError(
            f"{where}, line {lost.line}: {lost.id} is not connected with {first}: the graph falls apart",
            "add the missing edges, or import each part on its own",
        )


def _drop_unused(graph: _Graph) -> None:
    """Leaves out the picked-out parts of results (`__getitem__`) that nothing reads."""
    picked = [node for node in graph.values() if node.description.startswith("__getitem__") and not node.readers]
    for node in picked if len(graph) > 1 else ():
        del graph[node.id]
        for source in node.reads:
            del graph[source].readers[node.id]


def _order_nodes(graph: _Graph, where: str) -> list[str]:
    """The nodes so that each comes after what it reads; of those that may come next, the one after which least crosses.

    a ─▶ b ─▶ d      a branch is finished before the next one begins, because leaving it open would carry its
    └──▶ c ──┘       tensors along:  a b c d
    """
    sorter = TopologicalSorter({id: node.reads for id, node in graph.items()})
    try:
        sorter.prepare()
    except CycleError as fault:
        stuck = min((graph[id] for id in fault.args[1]), key=lambda node: node.line)
        raise ProfileError(
            f"{where}, line {stuck.line}: {stuck.id} waits for itself: the graph has a cycle", "remove the edge back"
        ) from None
    open_readers = {id: len(node.readers) for id, node in graph.items()}

    def preference(id: str) -> tuple[float, bool, int, str]:
        """First what lets the fewest more bytes cross: its output, less what nothing reads any more."""
        node, digits = graph[id], re.search(r"\d+", id)
        made = node.activation_bytes if node.readers else 0.0
        freed = (graph[source].activation_bytes for source in node.reads if open_readers[source] == 1)
        return made - sum(freed), order[-1] not in node.reads, int(digits[0]) if digits else 0, id

    order, ready = [""], list(sorter.get_ready())
    while ready:
        ready.remove(best := min(ready, key=preference))
        order.append(best)
        for source in graph[best].reads:
            open_readers[source] -= 1
        sorter.done(best)
        ready += sorter.get_ready()
    return order[1:]


def _layer(graph: _Graph, id: str, before: str, batch: int) -> LayerProfile:
    node = graph[id]
    sources = tuple(source for source in node.reads if not graph[source].is_input)
    return LayerProfile(
        name=id, kind=re.split(r"[( ]", node.description)[0] or "layer",
        forward_s=(node.forward_ms / 1e3,), backward_s=(node.backward_ms / 1e3,),
        output_bytes=node.activation_bytes / batch, saved_bytes=node.activation_bytes / batch,
        parameter_bytes=round(node.parameter_bytes),
        inputs=None if not before or sources == (before,) else sources,
    )  # fmt: skip
