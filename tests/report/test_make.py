"""Files in, files out; whatever names and notes hold."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from stagewright.cli.report import report
from stagewright.cluster import Cluster, Host
from stagewright.errors import FileError, UsageError
from stagewright.report import Failure, make_report
from stagewright.report.map import draw_map

from .synthetic import make_record, make_suite, make_titan, make_v100, save_all

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">{{ 7 * 7 }}\u2028'


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def tags(page: Path) -> list[tuple[str, dict[str, str | None]]]:
    return tags_of(page.read_text(encoding="utf-8"))


def tags_of(html: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(html)
    return parser.found


def test_a_folder_becomes_a_page_and_a_markdown_file(tmp_path: Path) -> None:
    records, failures, clusters = make_suite()
    save_all(records, tmp_path / "results")
    failures[0].save(tmp_path / "results" / "x.failure.json")
    clusters[0].save(tmp_path / "results" / "cluster.yaml")

    made = make_report(tmp_path / "results", tmp_path / "report")

    assert made.page == tmp_path / "report" / "report.html"
    markdown = made.markdown.read_text(encoding="utf-8")
    assert "as fast as data parallelism" in markdown
    assert "| hosts | devices a host | rows a device |" in markdown
    assert "needs 14.2 GiB on 0:0" in markdown
    assert re.search(r"\]\(<\.\./results/measured/vgg16-7-1\.\d+\.record\.json>\)", markdown)
    assert 'data-device="0:7"' in made.page.read_text(encoding="utf-8")


def test_names_notes_and_reasons_cannot_become_markup(tmp_path: Path) -> None:
    record = make_record(EVIL, notes=(EVIL,), limit=EVIL, cluster=EVIL, model=EVIL, data=EVIL, with_points=True)
    twin = make_record(EVIL, "simulated", cluster=EVIL, model=EVIL, data=EVIL)
    plain = make_report([make_record(with_points=True), make_record(source="simulated")], tmp_path / "plain")

    made = make_report([record, twin], tmp_path, failures=[Failure(name=EVIL, reason=EVIL, command=EVIL)])

    count = [tag for tag, _ in tags(plain.page)].count("script")
    assert [tag for tag, _ in tags(made.page)].count("script") == count
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in tags(made.page))
    html = MarkdownIt("commonmark").enable("table").render(made.markdown.read_text(encoding="utf-8"))
    assert "<table>" in html
    assert not {tag for tag, _ in tags_of(html)} & {"script", "img"}


def test_the_page_allows_only_its_own_scripts_and_no_request(tmp_path: Path) -> None:
    found = tags(make_report([make_record()], tmp_path).page)
    policy = next(attributes["content"] or "" for tag, attributes in found if "http-equiv" in attributes)

    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline'" not in policy.split(";")[1]
    outward = [value for _, attributes in found for key, value in attributes.items() if key in ("src", "href")]
    assert [value for value in outward if value and not value.startswith(("#", "data:"))] == []


def test_a_second_report_over_the_first_replaces_it(tmp_path: Path) -> None:
    make_report([make_record("old")], tmp_path)
    made = make_report([make_record("new")], tmp_path)
    text = made.page.read_text(encoding="utf-8")
    assert "new" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]


def test_nothing_to_report_and_nowhere_to_write_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one record"):
        make_report([], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="file"):
        make_report([make_record()], tmp_path / "file" / "sub")


@pytest.mark.parametrize("count", [1, 2], ids=["one record", "failures only"])
def test_the_smallest_reports(tmp_path: Path, count: int) -> None:
    bare = make_record(with_spans=False)
    made = make_report([bare][: 2 - count], tmp_path, failures=[Failure(name="f", reason="r")] * (count - 1))
    assert "</html>" in made.page.read_text(encoding="utf-8")


def test_every_device_and_junction_of_a_cluster_is_drawn() -> None:
    drawings = draw_map(make_v100(2))["hosts"]
    assert [drawing["svg"].count('class="device"') for drawing in drawings] == [8, 8]
    assert all(name in drawings[1]["svg"] for name in ("switch0", "switch1", "cpu", "nic"))
    assert drawings[0]["facts"][0] == "8 × V100, 16.0 GiB"


def test_a_host_without_links_is_drawn_too() -> None:
    lonely = Cluster(name="x", hosts=(Host(devices=make_titan().hosts[0].devices[:1]),))
    assert 'data-device="0:0"' in draw_map(lonely)["hosts"][0]["svg"]


def test_the_command_says_the_sentence_and_where_the_files_are(tmp_path: Path) -> None:
    save_all([make_record()], tmp_path)
    app = typer.Typer()
    app.command()(report)

    answer = CliRunner().invoke(app, [str(tmp_path)])

    assert answer.exit_code == 0, answer.output
    assert "VGG16 over 7 + 1 devices trains" in answer.output
    assert "report.html" in answer.output.replace("\n", "")


def test_data_blocks_are_json(tmp_path: Path) -> None:
    page = make_report([make_record(EVIL)], tmp_path).page.read_text(encoding="utf-8")
    blocks = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert len(blocks) == 2
    assert json.loads(blocks[0])["families"][0]["throughput"][0]["name"] == EVIL


def test_a_fact_of_several_lines_keeps_them(tmp_path: Path) -> None:
    topology = "      GPU0  GPU1\nGPU0   X    PIX\nGPU1  PIX    X"
    record = dataclasses.replace(make_record(), environment={"topology": topology, "driver": "440"})

    text = make_report([record], tmp_path).markdown.read_text()

    assert "- driver: 440" in text
    assert "  GPU0   X    PIX\n" in text
