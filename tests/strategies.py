"""Hypothesis strategies for what has a file: anything that is valid, small enough to read when a test fails."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from stagewright.cluster import Cluster, Device, DeviceId, Host, Link, parse_devices
from stagewright.plan import POLICIES, ROUTES, Plan, Stage
from stagewright.profile import LayerProfile, Precision, Profile
from stagewright.record import MEMORY_KINDS, DeviceUse, Point, Record, Source, Span
from stagewright.schedule import COMPUTE, TRANSFERS, Action, Kind, Schedule

LARGEST = (1 << 63) - 1

texts = st.text(max_size=8)
names = st.text(min_size=1, max_size=8)
words = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,5}", fullmatch=True)
notes = st.lists(texts, max_size=2).map(tuple)
counts = st.integers(1, LARGEST)
sizes = st.integers(0, LARGEST)
amounts = st.floats(0, allow_nan=False, allow_infinity=False)
positive = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)
labels = st.dictionaries(texts, texts, max_size=2)


def several(values: st.SearchStrategy, least: int = 0, most: int = 3, unique: bool = False) -> st.SearchStrategy:
    """Tuples of some values."""
    return st.lists(values, min_size=least, max_size=most, unique=unique).map(tuple)


devices = st.builds(
    Device,
    kind=texts,
    memory_bytes=counts,
    speed=positive,
    framework_bytes=sizes,
    step_overhead_s=amounts,
    saved_factor=positive,
)


def links(ends: st.SearchStrategy) -> st.SearchStrategy:
    """Links between some of these ends."""
    pairs = st.tuples(ends, ends).filter(lambda pair: pair[0] != pair[1])
    return several(st.builds(Link, ends=pairs, kind=texts, bytes_per_s=positive, latency_s=amounts), most=2)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """A host with links among its devices and junctions."""
    held = draw(several(devices, least=1))
    ends = st.one_of(words, st.integers(0, len(held) - 1).map(str))
    return Host(
        devices=held,
        links=draw(links(ends)),
        address=draw(texts),
        decode_images_per_s=draw(st.none() | positive),
        cpu_share=draw(st.none() | positive),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """A cluster with links between its hosts."""
    held = draw(several(hosts(), least=1, most=2))
    inside = st.tuples(st.integers(0, len(held) - 1), words).map(lambda pair: f"{pair[0]}:{pair[1]}")
    return Cluster(name=draw(texts), hosts=held, links=draw(links(words | inside)), notes=draw(notes))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A profile whose layers have a time for each batch size and read layers before them."""
    batch_sizes = tuple(sorted(draw(st.sets(counts, min_size=1, max_size=3))))
    times = several(amounts, least=len(batch_sizes), most=len(batch_sizes))
    layers: list[LayerProfile] = []
    for name in draw(several(names, least=1, unique=True)):
        before = [layer.name for layer in layers]
        reads = several(st.sampled_from(before)) if before else st.just(())
        layers.append(draw(layer_profiles(name, times, reads)))
    return Profile(
        model=draw(texts),
        device=draw(texts),
        precision=draw(st.sampled_from(get_args(Precision))),
        source=draw(st.sampled_from(("measured", "analytic", "imported"))),
        batch_sizes=batch_sizes,
        layers=tuple(layers),
        input_bytes=draw(amounts),
        optimizer_s=draw(amounts),
        model_s=draw(times),
        versions=draw(labels),
        notes=draw(notes),
    )


def layer_profiles(name: str, times: st.SearchStrategy, reads: st.SearchStrategy) -> st.SearchStrategy:
    """A layer of this name."""
    return st.builds(
        LayerProfile,
        name=st.just(name),
        kind=texts,
        forward_s=times,
        backward_s=times,
        spread=amounts,
        weight_share=st.floats(0, 1),
        weight_s=st.just(()) | times,
        output_bytes=amounts,
        saved_bytes=amounts,
        parameter_bytes=sizes,
        buffer_bytes=sizes,
        workspace_bytes=amounts,
        flops=amounts,
        inputs=st.none() | reads,
        cuttable=st.booleans(),
    )


device_ids = st.builds(DeviceId, st.integers(0, 2), st.integers(0, 9))


@st.composite
def stage_placements(draw: st.DrawFn) -> str:
    """The devices of a stage as people write them: `0:0-6,1:2`."""
    parts = []
    for host in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)):
        first, more = draw(st.integers(0, 999)), draw(st.integers(0, 5))
        parts.append(f"{host}:{first}-{first + more}" if more else f"{host}:{first}")
    return ",".join(parts)


placements = st.lists(stage_placements(), min_size=1, max_size=4).map(".".join)


@st.composite
def stages(draw: st.DrawFn, layers: tuple[str, ...]) -> Stage:
    """A stage of these layers."""
    devices = (
        parse_devices(draw(stage_placements())) if draw(st.booleans()) else draw(several(device_ids, 1, unique=True))
    )
    weights = several(positive, least=len(devices), most=len(devices))
    return Stage(
        layers=layers,
        devices=devices,
        versions=draw(counts),
        recompute=draw(st.booleans()),
        num_buckets=draw(counts),
        row_weights=draw(st.none() | weights),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of one to three stages."""
    layers = draw(several(names, least=1, most=5, unique=True))
    edges = sorted({0, len(layers), *draw(st.sets(st.integers(0, len(layers)), max_size=2))})
    batch = draw(counts)
    return Plan(
        model=draw(texts),
        stages=tuple(draw(stages(layers[first:last])) for first, last in zip(edges, edges[1:])),
        batch=batch,
        num_microbatches=draw(st.integers(1, batch)),
        route=draw(st.sampled_from(ROUTES)),
        policy=draw(st.sampled_from(POLICIES)),
        hold=draw(st.none() | counts),
        notes=draw(notes),
    )


@st.composite
def actions(draw: st.DrawFn) -> Action:
    """An action with the fields that its kind has."""
    kind, number = draw(st.sampled_from(Kind)), st.integers(0, 999_999)
    return Action(
        kind,
        -1 if kind is Kind.AGREE else draw(number),
        draw(st.integers(-999_999, 999_999)),
        draw(number) if kind in COMPUTE | TRANSFERS else -1,
        draw(number) if kind in TRANSFERS else -1,
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A plan with an order for each of its workers; what the orders do makes no sense."""
    plan = draw(plans())
    workers = len(plan.devices)
    orders = draw(several(several(actions(), most=4), least=workers, most=workers))
    return Schedule(plan=plan, orders=orders, agree=draw(st.booleans()))


@st.composite
def spans(draw: st.DrawFn, workers: int) -> Span:
    """A span of one of the workers."""
    start_s, stop_s = sorted((draw(amounts), draw(amounts)))
    whole = st.integers(-1, LARGEST)
    return Span(
        worker=draw(st.integers(0, workers - 1)),
        kind=draw(texts),
        stage=draw(whole),
        batch=draw(whole),
        microbatch=draw(whole),
        start_s=start_s,
        stop_s=stop_s,
        peer=draw(whole),
    )


@st.composite
def device_uses(draw: st.DrawFn) -> DeviceUse:
    """What a device did, with memory at as many times as there are values of each kind."""
    times_s = draw(several(amounts))
    course = st.lists(sizes, min_size=len(times_s), max_size=len(times_s)).map(tuple)
    return DeviceUse(
        device=draw(texts),
        stages=draw(several(sizes)),
        busy_share=draw(st.floats(0, 1)),
        peak_bytes=draw(sizes),
        peak_parts=draw(st.dictionaries(st.sampled_from(MEMORY_KINDS), sizes, max_size=2)),
        driver_bytes=draw(st.none() | sizes),
        driver_share=draw(st.none() | st.floats(0, 1)),
        memory_s=times_s,
        memory_parts=draw(st.dictionaries(st.sampled_from(MEMORY_KINDS), course, max_size=2)),
    )


points = st.builds(
    Point,
    name=texts,
    step=sizes,
    epoch=amounts,
    value=st.floats(allow_nan=False, allow_infinity=False),
    seconds=amounts,
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    """A record of any plan."""
    plan = draw(plans())
    return Record(
        name=draw(texts),
        source=draw(st.sampled_from(get_args(Source))),
        plan=plan,
        cluster=draw(texts),
        precision=draw(texts),
        data=draw(texts),
        epoch_samples=draw(st.none() | counts),
        step_s=draw(several(positive, least=1)),
        step_samples=draw(counts),
        start_up_s=draw(amounts),
        devices=draw(several(device_uses(), most=2)),
        spans=draw(several(spans(len(plan.devices)), most=2)),
        points=draw(several(points, most=2)),
        limit=draw(texts),
        command=draw(texts),
        environment=draw(labels),
        notes=draw(notes),
    )
