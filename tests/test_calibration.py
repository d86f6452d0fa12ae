"""Figures that are fitted come back, and published measurements are met."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.calibrate import LINK_PRIORS, AnalyticBench, calibrate
from benchmarks.fits import (
    Predictor,
    fit_cluster,
    golden,
    keep_unfitted,
    outcomes,
    two_unknowns,
    unfitted,
    with_decode_rate,
    with_link_rate,
)
from benchmarks.published import Row, find_cut, read_rows

from stagewright.cluster import find_cluster
from stagewright.errors import DataError, FileError
from tests.simulation.cases import layer, profile, star

MEASURED = Path(__file__).parents[2] / "shared" / "reference" / "measured.csv"
HEAD = (
    "id,cluster,model,mode,devices,stage_devices,cut_share,weight_versions,static_order,batch_per_device,"
    "images_per_step,precision,data,step_s,images_per_s,memory_mib_first_stage,memory_mib_last_stage\n"
)
LINE = "a,c,m,dp,8,7-1,cut near l1,2-1,,4,28,fp32,synthetic,0.5,56,100,\n"


class Invented:
    """A model of two layers on an invented kind of device, whose figures are known."""

    name = "d"

    def kind(self, name):
        return self

    def fit(self, kind, rows):
        return self

    def profile(self, kind, row):
        return profile(layer("l0", 0.01, 0.02, saved_bytes=1e6, parameter_bytes=10**8), layer("loss", 0.0, 0.0))


def row(name, replicas, step_s=1.0, data="synthetic", memory=None):
    return Row(
        id=name,
        cluster="star",
        model="m",
        replicas=(replicas,),
        versions=(1,),
        cut="",
        batch_per_device=4,
        precision="fp32",
        data=data,
        step_s=step_s,
        memory_bytes=(memory, None),
    )


def predicted(rows, cluster):
    predictor = Predictor(Invented(), Invented(), rows, cluster)
    return [replace(one, step_s=predictor.step_s(one, cluster)) for one in rows]


def test_a_link_rate_is_found_again():
    truth = star(*[3.0e9] * 4)
    rows = predicted([row("one", 1), row("four", 4)], truth)
    fit = fit_cluster(Invented(), with_link_rate(truth, "local", 7.0e9), rows)
    assert fit.cluster.wires[0].bytes_per_s == pytest.approx(3.0e9, rel=0.01)
    assert fit.notes == (f"local: {fit.cluster.wires[0].bytes_per_s:g} bytes/s, fitted to four.",)


def test_a_decode_rate_is_fitted_only_where_decoding_must_be_the_reason():
    truth = with_decode_rate(star(*[1e12] * 4), 50.0)
    rows = predicted([row("one", 1, data="records"), row("four", 4, data="records")], truth)
    fit = fit_cluster(Invented(), with_decode_rate(truth, None), rows)
    assert fit.cluster.hosts[0].decode_images_per_s == pytest.approx(50.0, rel=0.02)
    easy = fit_cluster(Invented(), with_decode_rate(truth, None), rows[:1])
    assert easy.cluster.hosts[0].decode_images_per_s is None


def test_framework_bytes_and_saved_factor_come_from_two_memory_figures():
    cluster = star(*[1e9] * 4)
    base = [row("one", 1), row("four", 4)]
    parts = [Predictor(Invented(), Invented(), [one], cluster).memory_parts(one, cluster, 0) for one in base]
    rows = [replace(one, memory_bytes=(round(5e8 + f + 1.5 * s), None)) for one, (f, s) in zip(base, parts)]
    rows.append(replace(rows[0], id="big", batch_per_device=400))
    fixed, saved = Predictor(Invented(), Invented(), rows, cluster).memory_parts(rows[2], cluster, 0)
    rows[2] = replace(rows[2], memory_bytes=(round(5e8 + fixed + 1.5 * saved), None))
    device = fit_cluster(Invented(), cluster, predicted(rows, cluster)).cluster.hosts[0].devices[0]
    assert (device.framework_bytes, device.saved_factor) == (pytest.approx(5e8, rel=0.01), pytest.approx(1.5, rel=0.01))


def test_what_was_not_fitted_stays_as_the_file_has_it():
    own = with_decode_rate(find_cluster("titan-v-8"), 12_345.0)
    start = unfitted(own, LINK_PRIORS)
    fitted = with_link_rate(start, "PHB", 1e9)
    kept = keep_unfitted(fitted, start, own)
    rates = {link.kind: link.bytes_per_s for link in kept.wires}
    assert rates["PHB"] == 1e9
    assert rates["SYS"] == {link.kind: link.bytes_per_s for link in own.wires}["SYS"]
    assert kept.hosts[0].decode_images_per_s == 12_345.0


def test_the_searches_find_the_lowest_point():
    assert golden(lambda x: (x - 1.25) ** 2, -3, 5, rounds=60) == pytest.approx(1.25, abs=1e-6)
    assert two_unknowns([(1, 1, 5), (1, 2, 7), (1, 3, 9)]) == pytest.approx((3.0, 2.0))


def test_a_row_is_read_with_its_stages(tmp_path):
    (tmp_path / "rows.csv").write_text(HEAD + LINE)
    (made,) = read_rows(tmp_path / "rows.csv")
    assert (made.replicas, made.versions, made.images, made.memory_bytes) == ((7, 1), (2, 1), 28, (100 << 20, None))
    assert find_cut(made.cut, ("l0", "l1", "loss"), "a") == 1


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("0.5", "-1", "line 2: column step_s is '-1'"),
        ("0.5", "nan", "column step_s is 'nan'"),
        ("7-1", "7-0", "column stage_devices is '7-0'"),
        ("fp32", "fp12", "column precision is 'fp12'"),
    ],
)
def test_a_row_that_cannot_be_is_refused_with_its_column(tmp_path, before, after, fault):
    (tmp_path / "rows.csv").write_text(HEAD + LINE.replace(before, after))
    with pytest.raises(DataError, match=fault):
        read_rows(tmp_path / "rows.csv")


def test_files_without_rows_or_columns_are_refused(tmp_path):
    (tmp_path / "empty.csv").write_text(HEAD)
    (tmp_path / "short.csv").write_text("id\na\n")
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(tmp_path / "empty.csv")
    with pytest.raises(DataError, match="is missing"):
        read_rows(tmp_path / "short.csv")
    with pytest.raises(FileError, match="No such file or directory"):
        read_rows(tmp_path / "none.csv")
    with pytest.raises(DataError, match="names no layer"):
        find_cut("cut somewhere", ("l0", "l1"), "a")


def test_the_script_refuses_what_is_no_table(tmp_path):
    (tmp_path / "rows.csv").write_text("id,cluster\n")
    with pytest.raises(DataError, match="holds no rows"):
        calibrate(tmp_path / "rows.csv")
    with pytest.raises(FileError, match=r"nowhere\.csv: No such file or directory"):
        calibrate(tmp_path / "nowhere.csv")


@pytest.mark.skipif(not MEASURED.exists(), reason="the measurements of others are not here")
def test_published_measurements_are_met():
    rows, bench = read_rows(MEASURED), AnalyticBench()
    clusters = {name: unfitted(find_cluster(name), LINK_PRIORS) for name in dict.fromkeys(r.cluster for r in rows)}
    found = {one.row.id: one for one in outcomes(bench, clusters, rows, rows, leave_one_out=False)}
    assert all(abs(one.error) < 0.05 for name, one in found.items() if "ssp" not in name)
    assert abs(found["alexnet-ssp-loss-only"].error) < 0.08
    assert abs(found["vgg16-ssp"].error) < 0.10
    memory = [abs(error) for one in found.values() for error in one.memory_errors]
    assert math.fsum(memory) / len(memory) < 0.10

    known = [one for one in rows if one.id in ("alexnet-dp1", "vgg16-dp1", "alexnet-dp8")]
    titan = [one for one in rows if one.cluster == "titan-v-8"]
    few = {one.row.id: one for one in outcomes(bench, clusters, titan, known, leave_one_out=False) if one.row in titan}
    assert abs(few["vgg16-dp8"].error) < 0.05
