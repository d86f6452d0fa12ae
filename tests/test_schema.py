"""The five schemas and their files: what is written is read back, and nothing else is taken for a schema."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagewright.cluster import (
    Cluster,
    DeviceId,
    find_cluster,
    format_placement,
    make_cluster,
    parse_placement,
    parse_ratio,
)
from stagewright.errors import FileError, PlacementError, RecordError, StagewrightError
from stagewright.plan import Plan, Stage
from stagewright.profile import LayerProfile, Profile
from stagewright.record import DeviceUse, Point, Record, Span, Spans
from stagewright.schedule import Schedule, parse_order
from stagewright.schema import Saved, dump_json, dump_yaml
from tests import strategies

SCHEMAS: dict[type[Saved], st.SearchStrategy] = {
    Cluster: strategies.clusters(),
    Profile: strategies.profiles(),
    Plan: strategies.plans(),
    Schedule: strategies.schedules(),
    Record: strategies.records(),
}
ENDINGS = (".json", ".yaml")
every_schema = pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
every_ending = pytest.mark.parametrize("ending", ENDINGS)


def small_plan() -> Plan:
    stages = (
        Stage(layers=("conv1", "conv2"), devices=(DeviceId(0, 0), DeviceId(0, 1)), versions=2, row_weights=(1.5, 1.0)),
        Stage(layers=("fc1", "loss"), devices=(DeviceId(1, 0),), recompute=True),
    )
    return Plan(model="tiny-cnn", stages=stages, batch=32, num_microbatches=4, route="rotate", notes=("why: 1:3",))


def small_profile() -> Profile:
    layer = LayerProfile(
        name="conv1", forward_s=(0.1, 1e-7), backward_s=(0.2, 3.0), output_bytes=1e3, saved_bytes=2.5, parameter_bytes=9
    )
    loss = LayerProfile(
        name="loss",
        kind="loss",
        forward_s=(0.0, 0.0),
        backward_s=(0.0, 1e300),
        output_bytes=4,
        saved_bytes=0,
        parameter_bytes=0,
        inputs=("conv1",),
    )
    return Profile(model="tiny-cnn", device="cpu", source="measured", batch_sizes=(1, 8), layers=(layer, loss))


def small_record() -> Record:
    use = DeviceUse(
        device="0:0", stages=(0,), busy_share=0.5, peak_bytes=1 << 30, peak_parts={"weights": 5},
        memory_s=(0.0, 0.25), memory_parts={"weights": (3, 5)},
    )  # fmt: skip
    return Record(
        name="tiny 2-1",
        source="simulated",
        plan=small_plan(),
        cluster="local",
        step_s=(0.25, 0.5),
        step_samples=32,
        devices=(use,),
        spans=(Span(0, "F", 0, 0, 0, 0.0, 0.125), Span(2, "SB", 1, 0, 0, 0.125, 0.25, 0)),
        points=(Point(name="loss", step=1, epoch=0.5, value=-2.25),),
        environment={"torch": "2.13.0"},
    )


SMALL: dict[type[Saved], Saved] = {
    Cluster: make_cluster(2),
    Profile: small_profile(),
    Plan: small_plan(),
    Schedule: Schedule(
        plan=small_plan(), orders=tuple(map(parse_order, ("F0.0+1 SF0.0>2+1 B0.0 U0", "U0-1", "RF1.0<0 A")))
    ),
    Record: small_record(),
}


# Round trips


@every_schema
@every_ending
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_saved_is_loaded(
    schema: type[Saved], ending: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = data.draw(SCHEMAS[schema])
    path = made.save(tmp_path_factory.getbasetemp() / f"file{ending}")
    assert schema.load(path) == made
    assert schema.from_dict(made.to_dict()) == made


@every_schema
def test_a_file_begins_with_its_format_and_version(schema: type[Saved], tmp_path: Path) -> None:
    text = SMALL[schema].save(tmp_path / "file.yaml").read_text()
    assert text.startswith(f"format: stagewright.{schema.__name__.lower()}\nversion: {schema.VERSION}\n")


def test_files_are_short_enough_to_read(tmp_path: Path) -> None:
    text = small_plan().save(tmp_path / "plan.json").read_text()
    assert '"devices": "0:0-1"' in text
    assert '"layers": ["conv1", "conv2"],' in text
    assert len(text.splitlines()) < 37


def test_yaml_means_what_it_looks_like(tmp_path: Path) -> None:
    """`1:3` is a device, not 63; `no` is a name, not false; `1e-5` is a number, not a name."""
    text = dump_yaml(small_plan().to_dict())
    text = text.replace("devices: 1:0", "devices: 1:3").replace("tiny-cnn", "no").replace("[1.5, 1.0]", "[1e-5, 1]")
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    plan = Plan.load(path)
    assert (plan.placement, plan.model, plan.stages[0].row_weights) == ("0:0-1.1:3", "no", (1e-5, 1.0))


AWKWARD = (
    "",
    " ",
    "a ",
    "no",
    "null",
    "~",
    "1e5",
    "0:7",
    "1:30",
    "012",
    "0x1f",
    "2001-01-01",
    "<<",
    "=",
    "- a",
    "a: b",
    "#",
)
SEPARATORS = ("\x85", "\u2028", "\ufeff", "\n", "\r\n", "a\tb", "\0", "\x7f", "\ufffe", "\U0001f600", "é", "'\"'")


@pytest.mark.parametrize("text", [*AWKWARD, *SEPARATORS], ids=ascii)
@every_ending
def test_awkward_names_are_read_as_they_were_written(text: str, ending: str, tmp_path: Path) -> None:
    cluster = Cluster(name=text, hosts=make_cluster(1).hosts, notes=(text, "plain"))
    assert Cluster.load(cluster.save(tmp_path / f"cluster{ending}")) == cluster


def test_a_yaml_file_may_repeat_a_part_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "format: stagewright.cluster\nversion: 1\nname: two\n"
        "hosts:\n- devices: [&card {kind: titan-v, memory_bytes: 100}, *card]\n"
    )
    assert [device.memory_bytes for device in Cluster.load(path).hosts[0].devices] == [100, 100]


def test_clusters_of_the_first_version_are_read_without_what_they_no_longer_have() -> None:
    new = SMALL[Cluster].to_dict()
    old = {**new, "version": 1, "crowding": 1.2, "core_loss": 0.03, "machine_bytes_per_s": None}
    assert Cluster.from_dict(old) == SMALL[Cluster]
    with pytest.raises(StagewrightError, match="key crowding is unknown"):
        Cluster.from_dict({**new, "crowding": 1.2})
    with pytest.raises(StagewrightError, match="key colour is unknown"):
        Cluster.from_dict({**old, "colour": "red"})


def test_records_of_the_first_version_counted_images() -> None:
    new = SMALL[Record].to_dict()
    old = {**new, "version": 1, "step_images": new["step_samples"], "epoch_images": 640}
    del old["step_samples"], old["epoch_samples"]
    assert Record.from_dict(old) == replace(small_record(), epoch_samples=640)
    with pytest.raises(StagewrightError, match="key step_images is unknown"):
        Record.from_dict({**new, "step_images": 32})


def test_saving_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "file.json").mkdir()
    with pytest.raises(FileError, match="directory"):
        small_plan().save(tmp_path / "file.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"Not a directory|File exists"):
        small_plan().save(tmp_path / "file" / "sub" / "plan.json")


@pytest.mark.parametrize("name", Cluster.ready_made())
def test_ready_made_clusters_are_valid(name: str) -> None:
    cluster = find_cluster(name)
    first, last = cluster.device_ids[0], cluster.device_ids[-1]
    assert cluster.path(first, last) or first == last


# Placements and ratios


@given(strategies.placements)
def test_placements_print_back_unchanged(text: str) -> None:
    assert format_placement(parse_placement(text)) == text


@given(st.lists(st.integers(1, 10**9 - 1) | st.decimals("0.001", 999, places=3), min_size=1, max_size=5))
def test_ratios_are_read_as_written(shares: list[Any]) -> None:
    assert parse_ratio(":".join(f"{share:f}" for share in shares)) == tuple(map(float, shares))


def test_placements_mean_what_the_design_says() -> None:
    seven_one = parse_placement("0:0-6.0:7")
    assert seven_one == (tuple(DeviceId(0, n) for n in range(7)), (DeviceId(0, 7),))
    both = tuple(DeviceId(host, n) for host in range(2) for n in range(8))
    assert parse_placement("0:0-7,1:0-7.0:0-7,1:0-7") == (both, both)
    assert parse_placement("", make_cluster(4)) == (tuple(DeviceId(0, n) for n in range(4)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:6-0", "counts down: write 0:0-6"),
        ("0:0,0:0", "names 0:0 twice"),
        ("0:0-65535,0:65535", "more than 65,536 devices"),
        ("0:0-60000,0:60000", "names 0:60000 twice"),
        ("0", "expected host:device"),
        ("0:0..0:1", "expected host:device"),
        ("0:٣", "expected host:device"),
        ("0:" + "9" * 5000, "expected host:device"),
    ],
)
def test_placements_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        parse_placement(text)


@pytest.mark.parametrize("text", ["", "0:1", "-1:2", "1:", "1;2", "nan:1", "1e5:1", "9" * 5000])
def test_ratios_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="expected positive numbers"):
        parse_ratio(text)


# Refusals: the file, the key, the value and what was expected


def changed(schema: type[Saved], *keys: str | int, to: object) -> dict[str, Any]:
    """The plain form of the small schema, with one value replaced."""
    plain = json.loads(json.dumps(SMALL[schema].to_dict()))
    inner = plain
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return plain


REFUSED: list[tuple[type[Saved], tuple[str | int, ...], object, str]] = [
    (Cluster, ("hosts", 0, "devices", 1, "memory_bytes"), "12 GB", r"hosts\[0\].devices\[1\].memory_bytes is '12 GB'"),
    (Cluster, ("hosts", 0, "devices", 0, "speed"), 0, "speed is 0: expected greater than 0"),
    (Cluster, ("hosts", 0, "colour"), "red", r"key hosts\[0\].colour is unknown"),
    (Cluster, ("hosts",), [], r"key hosts is \[\]: Tuple should have at least 1 item"),
    (Cluster, ("hosts", 0, "links", 0, "ends"), ["0", "9"], "ends at device 9; the host has devices 0 to 1"),
    (Profile, ("batch_sizes",), [8, 1], r"batch_sizes is \[8, 1\]: expected positive numbers, ascending"),
    (Profile, ("layers", 0, "forward_s"), [-1, 2], "forward_s is -1.0: expected no negative time"),
    (Profile, ("layers", 1, "inputs"), ["fc9"], "reads 'fc9', which is no layer before it"),
    (Profile, ("layers", 1, "name"), "conv1", "layer conv1 appears twice"),
    (Plan, ("stages", 0, "devices"), "0:1-0", "counts down"),
    (Plan, ("stages", 1, "layers"), ["conv1"], "layer conv1 is in the plan twice"),
    (Plan, ("num_microbatches",), 64, "a batch of 32 rows cannot be cut into 64 microbatches"),
    (Plan, ("num_microbatches",), True, "num_microbatches is True: expected a valid integer"),
    (Plan, ("policy",), "2f2b", "policy is '2f2b': expected 'gpipe', '1f1b'"),
    (Schedule, ("orders",), ["F0.0"], "has 1 orders, but the plan uses 3 devices"),
    (Schedule, ("orders", 0), "F0.0 Q", "action 'Q' cannot be read"),
    (Record, ("step_s",), [0.0], "step_s holds 0.0: expected positive seconds"),
    (Record, ("devices", 0, "memory_s"), [0.5], "memory_parts.weights holds 2 values, but memory_s holds 1"),
    (Record, ("spans", 0, 0), 7, "names worker 7: the plan has 3"),
    (Record, ("source",), "guessed", "source is 'guessed': expected 'simulated', 'rehearsed' or 'measured'"),
]


@pytest.mark.parametrize(("schema", "keys", "value", "message"), REFUSED)
@every_ending
def test_wrong_values_are_refused_by_name(
    schema: type[Saved], keys: tuple[str | int, ...], value: object, message: str, ending: str, tmp_path: Path
) -> None:
    path = tmp_path / f"file{ending}"
    plain = changed(schema, *keys, to=value)
    path.write_text(dump_yaml(plain) if ending == ".yaml" else dump_json(plain))
    with pytest.raises(StagewrightError, match=message) as caught:
        schema.load(path)
    assert str(path) in caught.value.what


@every_schema
def test_other_formats_and_newer_versions_are_refused(schema: type[Saved]) -> None:
    name, newer = schema.FORMAT, schema.VERSION + 1
    told = rf"here.json: version {newer} of {name} is newer than {schema.VERSION}.*\nupdate stagewright"
    with pytest.raises(FileError, match=told):
        schema.from_dict(changed(schema, "version", to=newer), where="here.json")
    with pytest.raises(FileError, match=f"key format is 'stagewright.song': expected '{name}'"):
        schema.from_dict(changed(schema, "format", to="stagewright.song"))
    for version in (0, -1, "1", 1.0, True, None):
        with pytest.raises(FileError, match="key version is"):
            schema.from_dict(changed(schema, "version", to=version))


@every_schema
def test_a_schema_made_in_python_checks_itself_too(schema: type[Saved]) -> None:
    with pytest.raises(StagewrightError, match=f"{schema.__name__}: key .* is missing"):
        schema()


def damaged_files() -> Iterator[tuple[str, str, str]]:
    """Files that ask for trouble: name with its ending, content, what the error says."""
    head = "format: stagewright.cluster\nversion: 1\nname: x\n"
    json_head = '{"format": "stagewright.cluster", "version": 1, "name": "x", "hosts": '
    levels = "".join(
        f"{letter}: &{letter} [*{before}, *{before}, *{before}, *{before}]\n"
        for before, letter in zip("abcdefghijklm", "bcdefghijklmn")
    )
    yield "deep.json", "[" * 100_000, "nested too deeply"
    yield "deeper.json", json_head + "[" * 400 + "]" * 400 + "}", "recursion limit"
    yield "deep.yaml", head + "hosts: " + "[" * 100 + "]" * 100, "nested too deeply"
    yield "deeper.yaml", "[" * 5000, "nested too deeply"
    yield "bomb.yaml", f"{head}a: &a [1, 2, 3, 4]\n{levels}", "more than 1,000,000 values"
    yield "key-bomb.yaml", f"{head}a: &a [1, 2, 3, 4]\n{levels}? *n\n: 1", "the key in line 17 is no text"
    merged = "".join(f"m{n}: &m{n} {{!!merge <<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 30))
    yield "merged.yaml", f"{head}m0: &m0 {{x: 1}}\n{merged}", "the key in line 5 is no text"
    yield "circle.yaml", head + "hosts: &a [*a]", "nested too deeply"
    yield "int.json", json_head + "9" * 5000 + "}", "too large: expected one of 64 bits"
    yield "int.yaml", head + "hosts: " + "9" * 30, "too large: expected one of 64 bits"
    yield "nan.json", json_head + "NaN}", "key hosts is nan"
    yield "infinite.json", json_head + "1e999}", "key hosts is inf"
    yield "twice.json", json_head + '[], "name": "y"}', "key 'name' stands twice"
    yield "twice.yaml", head + "name: y", "key 'name' stands twice"
    yield "number-key.yaml", head + "1: 2", "the key in line 4 is no text"
    yield "list-key.yaml", head + "? [a]\n: 2", "is no text"
    yield "nul.json", json_head + "\0}", "not JSON: Expecting value in line 1"
    yield "nul.yaml", head + "hosts: \0", "special characters are not allowed"
    yield "surrogate.json", '{"format": "stagewright.cluster", "version": 1, "name": "\\ud800"}', "unicode"
    yield "surrogate.yaml", 'format: stagewright.cluster\nversion: 1\nname: "\\ud800"\n', "unicode"
    yield "bytes.yaml", head + "hosts: !!binary aGVsbG8=", "cannot be read"
    yield "date.yaml", head + "hosts: !!timestamp 2001-01-01", "cannot be read"
    yield "no-date.yaml", head + "hosts: !!timestamp soon", "cannot be read"
    yield "no-bool.yaml", head + "hosts: !!bool perhaps", "cannot be read"
    yield "no-int.yaml", head + "hosts: !!int ''", "cannot be read"
    yield "code.yaml", head + "hosts: !!python/object/apply:os.getcwd []", "could not determine a constructor"
    yield "two.yaml", "a: 1\n---\nb: 2", "expected a single document"
    yield "empty.json", "", "not JSON"
    yield "empty.yaml", "", "holds NoneType"
    yield "list.json", "[]", "holds list, expected the keys of stagewright.cluster"


@pytest.mark.parametrize(("name", "content", "message"), list(damaged_files()), ids=lambda value: value[:20])
@pytest.mark.timeout(20)
def test_damaged_and_hostile_files_are_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(FileError, match=message) as caught:
        Cluster.load(path)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_files_that_cannot_be_opened_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"name": "caf\xe9"}')
    wrong = (tmp_path, tmp_path / "none.json", tmp_path / "latin.json", "a\0b.json", "x" * 5000)
    for path in wrong:
        with pytest.raises(FileError, match=r"directory|No such file|not text in UTF-8|null|too long"):
            Plan.load(path)


# 10,000 mutations

TOKENS = (
    *("0", "-1", "1e999", "-0.0", "1e-320", "9" * 25, "NaN", "Infinity", "null", "true", "1.5", '""', '"\\u0000"'),
    *('"\\ud800"', "[]", "{}", "[[", "]]", '{"a": 1}', "~", "&a", "*a", "<<: *a", "!!int", "!!binary x", "? ", "- "),
    *(
        "---",
        "\t",
        "\0",
        "\ufeff",
        "\u2028",
        "'",
        '"',
        ":",
        ",",
        "0:0-65535",
        "1:0,1:0",
        "F0.0",
        "A",
        "٣",
        "format",
        "name",
    ),
)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """The content with a few bytes flipped, removed, put in, repeated or cut off."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 8, 40))
        changes: tuple[Callable[[], bytes], ...] = (
            lambda length=length: rng.randbytes(length),
            lambda: b"",
            lambda at=at, length=length: bytes(changed[at : at + length]) * 2,
            lambda at=at: bytes(byte ^ (1 << rng.randrange(8)) for byte in changed[at : at + 1]),
        )
        changed[at : at + length] = rng.choice(changes)()
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.1 else changed)


def mutate_text(content: bytes, rng: random.Random) -> bytes:
    """The content with a value, a word or a line replaced, repeated, moved or removed."""
    text = content.decode()
    if rng.random() < 0.3:
        lines = text.splitlines(keepends=True)
        first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[first] = rng.choice(("", lines[second], lines[first] * 2, "  " + lines[first]))
        return "".join(lines).encode()
    words = [word for word in text.replace(",", " ").split() if word]
    old, new = rng.choice(words), rng.choice((*TOKENS, *words))
    return text.replace(old, new, rng.choice((1, -1))).encode("utf-8", "surrogatepass")


@every_schema
@pytest.mark.parametrize(("ending", "number"), [(".json", 1400), (".yaml", 600)])
def test_mutations_give_an_error_or_a_valid_schema(
    schema: type[Saved], ending: str, number: int, tmp_path: Path
) -> None:
    """5 schemas × (1,400 + 600) = 10,000 files, each with its own seed."""
    valid = SMALL[schema].save(tmp_path / f"valid{ending}").read_bytes()
    path, refused = tmp_path / f"mutated{ending}", 0
    for seed in range(number):
        rng = random.Random(f"{schema.__name__}{ending}{seed}")
        path.write_bytes((mutate_bytes if seed % 2 else mutate_text)(valid, rng))
        try:
            loaded = schema.load(path)
        except StagewrightError:
            refused += 1
        else:
            assert schema.from_dict(loaded.to_dict()) == loaded
    print(f"{number} mutations of a {schema.__name__}{ending}: {refused} refused, {number - refused} still valid")
    assert number * 0.3 < refused < number


# Spans in columns


def in_columns(*groups: Sequence[Span]) -> Spans:
    return Spans(*(tuple(zip(*group)) for group in groups))


def pickled(value: object) -> object:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - its own bytes


def test_spans_in_columns_are_as_good_as_a_tuple_of_them() -> None:
    few = small_record().spans
    spans = in_columns(few, [Span(1, "U", 0, 0, -1, 0.25, 0.5)])
    plain = (*few, Span(1, "U", 0, 0, -1, 0.25, 0.5))
    assert (len(spans), tuple(spans), spans[0], spans[-1], spans[:2]) == (3, plain, plain[0], plain[2], plain[:2])
    assert spans == plain == spans
    assert spans == in_columns(plain)
    assert spans != plain[:2]
    assert (hash(spans), repr(spans)) == (hash(plain), repr(plain))
    assert plain[1] in spans
    assert pickled(spans) == copy.deepcopy(spans) == plain
    assert not Spans()


@every_ending
def test_a_record_with_spans_in_columns_is_the_same_record(ending: str, tmp_path: Path) -> None:
    plain = small_record()
    record = replace(plain, spans=in_columns(plain.spans))
    assert isinstance(record.spans, Spans)
    assert record == plain == record
    assert record.to_dict() == plain.to_dict()
    files = [each.save(tmp_path / f"{name}{ending}").read_text() for name, each in (("a", record), ("b", plain))]
    assert files[0] == files[1]
    assert pickled(record) == plain
    assert replace(record, name="other").spans is record.spans


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Span(7, "F", 0, 0, 0, 0.0, 0.5), "span F names worker 7: the plan has 3"),
        (Span(-1, "F", 0, 0, 0, 0.0, 0.5), "span F names worker -1: the plan has 3"),
        (Span(1, "B", 0, 0, 0, 0.5, 0.25), "span B of worker 1 stops at 0.25 before it starts"),
        (Span(1, "B", 0, 0, 0, 0.5, math.nan), "span B of worker 1 stops at nan before it starts"),
    ],
)
def test_wrong_spans_are_refused_in_columns_too(wrong: Span, words: str) -> None:
    plain = small_record()
    for spans in ((*plain.spans, wrong), in_columns(plain.spans, [wrong])):
        with pytest.raises(RecordError, match=words):
            replace(plain, spans=spans)


def test_columns_of_unequal_lengths_are_refused() -> None:
    columns = [[0, 1], ["F"], [0, 0], [0, 0], [0, 0], [0.0, 0.0], [1.0, 1.0], [-1, -1]]
    with pytest.raises(RecordError, match=r"columns of unequal lengths: .'worker': 2, 'kind': 1"):
        Spans(tuple(columns))
