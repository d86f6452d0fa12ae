"""What is told of hosts by what they measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.profile import LayerProfile, Profile
from stagewright.rehearsal import emulated_hosts
from stagewright.rehearsal.measuring import average, measure_hosts
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


@pytest.mark.skipif(missing() is not None, reason=f"emulated hosts: {missing()}")
def test_hosts_measure_layers_links_and_what_a_byte_costs(tmp_path: Path) -> None:
    """Shares say how fast hosts compute, and only those with the first one's time the layers."""
    cluster = star(12.5e6, 12.5e6, shares=(0.8, 0.2))
    with emulated_hosts(cluster) as hosts:
        profile, found = measure_hosts(cluster, hosts, tmp_path, model="tiny-cnn", options={}, batch_sizes=(8, 64))
    assert profile.batch_sizes == (8, 64)
    assert [path.name for path in tmp_path.glob("*.profile.json")] == ["inside-0.profile.json"]
    assert [host.devices[0].speed for host in found.hosts] == [1.0, 0.25]
    assert all(0 < link.bytes_per_s < 14e6 for link in found.links), "as fast as the limit lets it be, at most"
    assert 0 < found.core_s_per_byte < 1e-6
    assert found.cores is not None
    assert "measured between emulated hosts" in found.notes[-1]
