"""What is told of hosts by what they measured."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from stagewright.profile import LayerProfile, Profile
from stagewright.profiling.links import all_at_once, with_all_at_once
from stagewright.rehearsal import emulated_hosts
from stagewright.rehearsal.measuring import Request, average, measure_hosts
from stagewright.rehearsal.slices import slice_cluster
from stagewright.rehearsal.tools import missing
from tests.rehearsal.clusters import star


def test_layers_of_several_hosts_add_up_to_the_model_in_one_piece() -> None:
    """Each host was disturbed in another layer: the medians of the layers know of none of it, the whole's does."""

    def seen(first_s: float, second_s: float) -> Profile:
        layers = tuple(
            LayerProfile(
                name=name, forward_s=(seconds / 3,), backward_s=(seconds / 1.5,), output_bytes=8, saved_bytes=8,
                parameter_bytes=0,
            )
            for name, seconds in (("conv", first_s), ("fc", second_s))
        )  # fmt: skip
        return Profile(
            model="any", device="cpu", source="measured", batch_sizes=(4,), layers=layers, model_s=(first_s + second_s,)
        )

    made = average([seen(1.5, 1.0), seen(1.0, 1.5), seen(1.0, 1.0)])
    assert made.model_s == (2.5,)
    assert sum(layer.forward_s[0] + layer.backward_s[0] for layer in made.layers) == pytest.approx(2.5)
    assert made.layers[0].backward_s[0] == pytest.approx(2.5 / 3)


def test_several_connections_at_once_show_what_a_host_and_the_machine_move() -> None:
    """Three workers over loopback; what they show becomes links of the cluster."""
    with TemporaryDirectory() as folder:
        spawn(move_all_at_once, (3, folder), nprocs=3)
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("told-*"))]
    assert len(told) == 3
    for kind in ("to one", "from one", "each"):
        assert min(each[kind] for each in told) > 1e6
    cluster = with_all_at_once(slice_cluster(3, 1e8), {"to one": 6e8, "from one": 3e8, "each": 2e8})
    assert [link.bytes_per_s for link in cluster.links] == [4e8] * 3
    assert (cluster.connection_bytes_per_s, cluster.machine_bytes_per_s) == (1e8, 6e8)


def move_all_at_once(rank: int, size: int, folder: str) -> None:
    """One worker of the test above."""
    meeting = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    strands = [dist.new_group(backend="gloo") for _ in range(2)]
    Path(folder, f"told-{rank}").write_text(json.dumps(all_at_once(rank, size, 1 << 20, strands)))
    dist.destroy_process_group()


@pytest.mark.skipif(missing() is not None, reason=f"emulated hosts: {missing()}")
def test_a_slower_host_tells_its_speed_and_makes_no_profile(tmp_path: Path) -> None:
    cluster = star(125e6, 125e6, shares=(0.8, 0.2))
    request = Request(model="tiny-cnn", options={}, batch_sizes=(8, 64), links=False)
    with emulated_hosts(cluster) as hosts:
        profile, found, beats = measure_hosts(cluster, hosts, request, tmp_path)
    assert profile is not None
    assert beats is not None
    assert beats.beat_s > 0
    assert min(beats.in_beats) > 0
    assert profile.batch_sizes == (8, 64)
    assert [path.name for path in tmp_path.glob("*.profile.json")] == ["inside-0.profile.json"]
    fast, slow = (host.devices[0].speed for host in found.hosts)
    assert fast == 1.0
    first, second = (json.loads((tmp_path / f"inside-{number}.json").read_text()) for number in (0, 1))
    assert slow == pytest.approx(first["model_s"] / second["model_s"], rel=1e-3), "a quarter, on a quiet machine"
    assert "alone_s" not in second
    assert found.crowding == pytest.approx(max(profile.model_s[1] / first["alone_s"], 1.0), rel=1e-3)
