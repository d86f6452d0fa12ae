"""PipeDream's `graph.txt`: chains, branches, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.errors import FileError, ProfileError
from stagewright.memory import crossings
from stagewright.profiling.pipedream import import_pipedream, read_pipedream
from tests.planning.cases import PIPEDREAM, ROWS, needs_pipedream


def node(name: str, size: float = 8.0, *, kind: str = "Linear(4, 4)", times: str = "1.0, 2.0") -> str:
    forward, backward = times.split(", ")
    return (
        f"{name} -- {kind} -- forward_compute_time={forward}, backward_compute_time={backward}, "
        f"activation_size={size}, parameter_size=16.0"
    )


def text_of(*nodes: str, edges: str) -> str:
    pairs = [edge.split(">") for edge in edges.split()]
    return "\n".join([*nodes, *(f"\tnode{source} -- node{target}" for source, target in pairs)])


CHAIN = text_of(node("node2"), node("node1", kind="Input", times="900, 0"), node("node3"), edges="1>2 2>3")
DIAMOND = text_of(*(node(f"node{n}", size=8.0 * n) for n in (4, 2, 3, 1, 5)), edges="1>2 1>3 2>4 3>4 4>5")


def test_nodes_come_in_any_order_and_inputs_are_no_compute() -> None:
    profile = read_pipedream(CHAIN, batch=4)
    assert profile.names == ("node2", "node3")
    assert profile.layers[0].forward_s == (0.001,)
    assert profile.layers[0].backward_s == (0.002,)
    assert (profile.layers[0].output_bytes, profile.layers[0].parameter_bytes) == (2.0, 16)
    assert profile.input_bytes == 2.0
    assert all(layer.inputs is None for layer in profile.layers)


def test_a_branch_carries_what_is_still_to_be_read() -> None:
    """a = 8 bytes feeds 16 and 24; before the join both cross, and a does no longer."""
    profile = read_pipedream(DIAMOND, batch=1)
    assert profile.names == ("node1", "node2", "node3", "node4", "node5")
    assert profile.layers[3].inputs == ("node2", "node3")
    assert crossings(profile)[1:5] == (8.0, 8.0 + 16.0, 16.0 + 24.0, 32.0)


def test_a_branch_is_finished_before_the_next_one_begins() -> None:
    text = text_of(*(node(f"node{n}") for n in range(1, 7)), edges="1>2 1>3 2>4 3>5 4>6 5>6")
    assert read_pipedream(text, batch=1).names in (
        ("node1", "node2", "node4", "node3", "node5", "node6"),
        ("node1", "node3", "node5", "node2", "node4", "node6"),
    )


def test_several_outputs_are_added_up() -> None:
    text = CHAIN.replace(
        "activation_size=8.0, parameter_size=16.0\nnode1", "activation_size=[8.0; 4.0], parameter_size=16.0\nnode1"
    )
    assert read_pipedream(text, batch=4).layers[0].output_bytes == 3.0


def test_picked_out_results_that_nothing_reads_are_dropped() -> None:
    text = text_of(node("node1"), node("node2", kind="__getitem__(1)"), node("node3"), edges="1>2 1>3")
    assert read_pipedream(text, batch=1).names == ("node1", "node3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DIAMOND + "\n\tnode5 -- node2", r"line \d+: node\d waits for itself: the graph has a cycle"),
        (text_of(node("node1"), node("node2"), edges=""), "line 2: node2 is not connected with node1"),
        (CHAIN.replace("=1.0", "=-1.0"), "line 1: key forward_compute_time is -1.0: expected a finite number"),
        (CHAIN.replace("=1.0", "=nan"), "line 1: key forward_compute_time is nan: expected a finite number"),
        (CHAIN.replace("=1.0", "=inf"), "line 1: key forward_compute_time is inf"),
        (CHAIN.replace("=1.0", "=soon"), "line 1: key forward_compute_time is 'soon': expected a number"),
        (CHAIN.replace("forward_compute_time=1.0, ", ""), "line 1: key forward_compute_time is missing"),
        (CHAIN + "\n\tnode3 -- node9", "line 6: the edge names 'node9', which is no node"),
        (CHAIN + "\n" + node("node2"), "line 6: node2 was already in line 1"),
        ("hello", "line 1: expected `node"),
        ("", "holds no node"),
        (node("node1", kind="Input"), "holds no node beside inputs"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        read_pipedream(text, batch=4)


def test_a_batch_of_zero_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="the batch is 0 rows"):
        read_pipedream(CHAIN, batch=0)
    with pytest.raises(FileError, match="No such file"):
        import_pipedream(tmp_path / "none.txt", batch=1)
    (tmp_path / "raw.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="not text in UTF-8"):
        import_pipedream(tmp_path / "raw.txt", batch=1)


@needs_pipedream
@pytest.mark.parametrize(
    ("name", "layers", "seconds", "megabytes"),
    [
        ("vgg16", 40, 0.672535, 553),
        ("alexnet", 22, 0.085321, 244),
        ("gnmt", 37, 0.089416, 775),
        ("resnet50", 176, 0.443419, 102),
    ],
)
def test_the_published_profiles_are_read_whole(name: str, layers: int, seconds: float, megabytes: int) -> None:
    profile = import_pipedream(PIPEDREAM / f"{name}.txt", batch=ROWS[name])
    assert len(profile.layers) == layers
    assert sum(each.forward_s[0] + each.backward_s[0] for each in profile.layers) == pytest.approx(seconds)
    assert sum(each.parameter_bytes for each in profile.layers) // 10**6 == megabytes


@needs_pipedream
def test_between_residual_blocks_one_tensor_crosses() -> None:
    """Where a block of ResNet-50 ends, the cut carries its output alone, and no cut carries more than three tensors."""
    profile = import_pipedream(PIPEDREAM / "resnet50.txt", batch=128)
    carried = crossings(profile)[1:-1]
    outputs = {layer.output_bytes for layer in profile.layers}
    assert sum(each in outputs for each in carried) >= 16
