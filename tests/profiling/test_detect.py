"""This machine as a cluster, its wires measured, and the kinds of device that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.cluster import Cluster, make_cluster
from stagewright.errors import ClusterError, FileError
from stagewright.profiling.detect import cpu_cluster, detect_cluster, read_gpus
from stagewright.profiling.kinds import DeviceKind, find_kind, kind_called, plain_name, relative_speed
from stagewright.profiling.links import Pair, measure_links, measure_workers, pairs_of, with_pairs

LISTING = "Tesla V100-SXM2-16GB, 16160\nTesla V100-SXM2-16GB, 16160\n"
TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-3\nGPU1\tNV2\t X \t0-3\n"


def asked(listing: str | None, topology: str | None = None) -> Cluster:
    def ask(command: Sequence[str]) -> str | None:
        return topology if "topo" in command else listing

    return detect_cluster(ask=ask)


def test_gpus_are_found_with_their_wires() -> None:
    cluster = asked(LISTING, TOPOLOGY)
    assert [device.kind for device in cluster.hosts[0].devices] == ["v100", "v100"]
    assert cluster.hosts[0].links[0].kind == "NV2"


def test_a_driver_that_shows_no_topology_still_gives_a_cluster() -> None:
    cluster = asked("NVIDIA H200, 143771\nNVIDIA H200, 143771\n")
    assert cluster.path(*cluster.device_ids)
    assert cluster.hosts[0].devices[0].memory_bytes == 143771 << 20


def test_without_gpus_the_cores_are_the_devices() -> None:
    cluster = asked(None)
    assert {device.kind for device in cluster.hosts[0].devices} == {"cpu"}
    assert len(cpu_cluster(3).device_ids) == 3


def test_mixed_cards_differ_in_speed_and_memory() -> None:
    first, second, unknown = read_gpus("Tesla V100-SXM2-16GB, 16160\nTITAN V, 12066\nNVIDIA GeForce RTX 9999, 1024")
    assert first.speed == 1.0
    assert 0.5 < second.speed < 1.0
    assert (unknown.kind, unknown.speed) == ("rtx-9999", 1.0)
    assert first.memory_bytes > second.memory_bytes


def test_a_listing_that_cannot_be_read_is_refused_with_its_line() -> None:
    with pytest.raises(ClusterError, match="line 2: 'oops'"):
        read_gpus("TITAN V, 12066\noops")


def test_links_are_measured_between_processes_that_really_run() -> None:
    pairs = pairs_of(measure_workers(2, large_bytes=1 << 20))
    assert list(pairs) == [(0, 1)]
    assert 1e7 < pairs[0, 1].bytes_per_s < 1e12
    assert 1e-6 < pairs[0, 1].latency_s < 1.0


def test_a_wire_is_as_fast_as_the_fastest_pair_that_used_it() -> None:
    cluster = make_cluster(3)
    slow, fast = Pair(1e9, 4e-5), Pair(2e9, 6e-5)
    made = with_pairs(cluster, {(0, 1): fast, (0, 2): slow, (1, 2): slow}, "by hand")
    assert [link.bytes_per_s for link in made.hosts[0].links] == [2e9, 2e9, 1e9]
    assert [link.latency_s for link in made.hosts[0].links] == [2e-5, 2e-5, 2e-5]
    assert made.notes[-1] == "link rates and latencies measured by hand"


def test_one_device_has_no_link_to_measure() -> None:
    with pytest.raises(ClusterError, match="1 devices: links are measured between two"):
        measure_links(make_cluster(1))


def test_the_known_kinds_load_and_say_what_they_were_fitted_from() -> None:
    assert {"titan-v", "v100", "a100", "h100", "h200", "cpu"} <= set(DeviceKind.ready_made())
    for name in DeviceKind.ready_made():
        kind = find_kind(name)
        assert kind.name == name
        assert kind.notes
        assert kind.device().memory_bytes > kind.framework_bytes


def test_a_kind_is_found_by_the_drivers_name() -> None:
    found = kind_called("NVIDIA H100 80GB HBM3")
    assert found is not None
    assert found.name == "h100"
    assert kind_called("Radeon") is None
    assert plain_name("NVIDIA GeForce RTX 4090") == "rtx-4090"


def test_a_precision_has_its_own_efficiency_where_the_file_says_so() -> None:
    kind = find_kind("v100")
    assert kind.rate("conv", "fp16") == pytest.approx(kind.efficiency["conv.fp16"] * 1.25e14)
    assert kind.rate("conv", "fp64") == pytest.approx(kind.efficiency["conv"] * 7.8e12)
    assert relative_speed(kind, kind) == 1.0


def test_a_kind_can_be_ones_own_file(tmp_path: Path) -> None:
    own = replace(find_kind("cpu"), name="mine")
    own.save(tmp_path / "mine.yaml")
    assert find_kind(str(tmp_path / "mine.yaml")) == own


def test_unknown_and_impossible_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no device is named 'tpu'"):
        find_kind("tpu")
    with pytest.raises(ClusterError, match=r"key efficiency\.memory is missing"):
        replace(find_kind("cpu"), efficiency={"conv": 1.0, "matmul": 1.0})
    with pytest.raises(ClusterError, match=r"key conv is -1\.0"):
        replace(find_kind("cpu"), efficiency={"conv": -1.0, "matmul": 1.0, "memory": 1.0})
    with pytest.raises(ClusterError, match=r"key peak_flops\.fp32 is missing"):
        replace(find_kind("cpu"), peak_flops={"fp16": 1.0})
    (tmp_path / "bad.yaml").write_text("format: stagewright.device\nversion: 1\nname: bad\n")
    with pytest.raises(FileError, match="missing"):
        DeviceKind.load(tmp_path / "bad.yaml")
