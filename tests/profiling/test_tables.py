"""Figures of others as tables: profiles of several kinds of device, and links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.cluster import Cluster, DeviceId, Host
from stagewright.errors import ProfileError, StagewrightError
from stagewright.network import Network
from stagewright.profile import Profile
from stagewright.profiling.kinds import find_kind, with_kinds_of
from stagewright.profiling.tables import import_links, import_profile

HEAD = "layer,device,samples,tensor_parallel,forward_s,backward_s,update_s,weight_bytes,activation_bytes,output_bytes"
LAYERS = f"""{HEAD}
a,t4,1,1,0.1,0.2,0.01,100,40,8
a,t4,4,1,0.3,0.6,0.01,100,160,32
loss,t4,1,1,0.01,0.01,,0,4,4
loss,t4,4,1,0.02,0.02,,0,16,16
a,a100,1,2,0.01,0.02,0.001,50,20,8
loss,a100,1,2,0.001,0.001,,0,4,4
"""


def written(folder: Path, text: str, name: str = "table.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_table_of_layers_makes_a_profile_of_each_kind(tmp_path: Path) -> None:
    found = import_profile(written(tmp_path, LAYERS), model="net")
    assert [*found.by_kind] == ["t4", "a100-tp2"]
    assert (found.names, found.batch_sizes, found.optimizer_s) == (("a", "loss"), (1, 4), 0.01)
    (layer, _), (group, _) = found.layers, found.by_kind["a100-tp2"].layers
    assert (layer.forward_s, layer.saved_bytes, layer.output_bytes, layer.parameter_bytes) == ((0.1, 0.3), 40, 8, 100)
    assert (group.backward_s, group.parameter_bytes) == ((0.02,), 50)
    assert Profile.load(found.save(tmp_path / "one.json")) == found


def test_profiles_in_a_folder_are_read_together(tmp_path: Path) -> None:
    found = import_profile(written(tmp_path, LAYERS), model="net")
    for kind, each in found.by_kind.items():
        replace(each, others=()).save(tmp_path / "all" / f"{kind}.json")
    assert sorted(Profile.load(tmp_path / "all").by_kind) == ["a100-tp2", "t4"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("layer,device\n", "column samples is missing"),
        (HEAD, "holds no row"),
        (f"{HEAD}\na,t4,1,1,x,0.2,0,1,1,1\n", "line 2: forward_s is 'x'"),
        (f"{HEAD}\na,t4,0,1,1,0.2,0,1,1,1\n", "line 2: samples is 0"),
        (f"{HEAD}\na,t4,1\n", "line 2: 10 values expected"),
        (f"{LAYERS}a,t4,1,1,1,1,1,1,1,1\n", "stands there twice"),
        (f"{LAYERS}b,t4,2,1,1,1,1,1,1,1\n", r"b on t4 has samples \[2\]"),
        (f"{LAYERS}b,a100,1,2,1,1,1,1,1,1\n", "different models: layer none in one is b"),
    ],
)
def test_a_wrong_table_says_where(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ProfileError, match=error):
        import_profile(written(tmp_path, text))


def test_links_are_fitted_and_may_differ_by_direction(tmp_path: Path) -> None:
    text = "from,to,bytes,seconds\n0:0,1:0,1000,0.0011\n0:0,1:0,101000,0.0111\n1:0,0:0,1000000,0.2\n0:0,0:1,8,0.001\n"
    cluster = import_links(written(tmp_path, text), find_kind("rtx-3090").device())
    assert [len(host.devices) for host in cluster.hosts] == [2, 1]
    network, here, there = Network(cluster), DeviceId(0, 0), DeviceId(1, 0)
    assert network.rate(here, there) == pytest.approx(1e7)
    assert network.latency_s(here, there) == pytest.approx(1e-3)
    assert network.rate(there, here) == pytest.approx(5e6)
    assert Cluster.load(cluster.save(tmp_path / "c.yaml")) == cluster


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("0:0,0:0,1,1", "to itself"),
        ("0:0,2:0,1,1", "no message names 1:0"),
        ("0:0,1:0,0,1", "bytes is '0'"),
        ("a,1:0,1,1", "expected host:device"),
    ],
)
def test_a_wrong_link_says_where(tmp_path: Path, row: str, error: str) -> None:
    with pytest.raises(StagewrightError, match=error):
        import_links(written(tmp_path, f"from,to,bytes,seconds\n{row}\n"), find_kind("rtx-3090").device())


def test_a_kind_without_a_profile_is_worked_out_from_the_nearest_one_and_said(tmp_path: Path) -> None:
    own = import_profile(
        written(tmp_path, LAYERS.replace("t4", "rtx-3090").replace("a100,1,2", "a100,1,1")), model="net"
    )
    own = replace(Profile.of_kinds([own.by_kind["rtx-3090"]]), others=())
    device = find_kind("rtx-3090").device()
    hosts = [Host(devices=(device, find_kind(kind).device())) for kind in ("rtx-4090", "b200")]
    both = with_kinds_of(own, Cluster(name="c", hosts=tuple(hosts)))
    assert [*both.by_kind] == ["rtx-3090", "rtx-4090", "b200"]
    other, memory = (
        both.by_kind["rtx-4090"],
        [find_kind(each).rate("memory", "fp32") for each in ("rtx-3090", "rtx-4090")],
    )
    assert other.layers[0].forward_s[0] == pytest.approx(own.layers[0].forward_s[0] * memory[0] / memory[1])
    assert "rtx-4090: worked out from the profile of rtx-3090 by their data sheets" in other.notes[-1]
    assert with_kinds_of(own, Cluster(name="c", hosts=(Host(devices=(device, replace(device, kind="x"))),))) == own
