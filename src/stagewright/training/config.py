"""The configuration of a run: a small tree of frozen sections that a file, the command line and Python all fill.

    fields below  ◀──  recipe  ◀──  --config FILE  ◀──  options        what stands further right wins

A key of the file is an option without its dashes: `plan: {schedule: gpipe}` is `--schedule gpipe`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from stagewright.errors import FileError, UsageError
from stagewright.planning.options import PlanOptions
from stagewright.runtime.settings import Computing
from stagewright.schema import Saved, adapter, check_head, read_plain, schema, shown
from stagewright.training.events import LogFormat, SinkName
from stagewright.training.recipes import Adapters, RecipeFile
from stagewright.training.sections import read_section, section_keys

CONFIG_FILE = "config.yaml"
"""The configuration in a run's folder; its workers read it."""
SYNTHETIC, TEXT, TOKENS, PYTHON = "synthetic", "text:", "tokens:", "python:"
"""What data is called, or begins with, that is no folder of images."""
_Layer = Mapping[str, Mapping[str, Any]]
"""Plain values by section and key, as one source gives them."""


@schema(error=UsageError)
class ModelOptions(Adapters):
    """Which model, and how large."""

    name: str
    """a model of `stagewright models`, hf:FOLDER or python:FILE.py:FUNCTION"""
    image_size: int | None = Field(default=None, ge=1)
    """side of the images"""
    num_classes: int | None = Field(default=None, ge=1)
    """classes that the model tells apart"""
    sequence_length: int | None = Field(default=None, ge=2)
    """tokens of a row; the model's own context by default"""
    from_scratch: bool = False
    """draw the weights of hf:FOLDER instead of reading them"""


@schema(error=UsageError)
class DataOptions:
    """What it is trained and evaluated on."""

    data: str = SYNTHETIC
    """synthetic, a folder of records, tar shards or images, text:FILE_OR_FOLDER, tokens:FOLDER, or
    python:FILE.py:FUNCTION, which returns a Dataset or a DataLoader"""
    evaluation_data: str | None = None
    """the same, to evaluate on"""
    validation: float | None = Field(default=None, gt=0, lt=1)
    """share of the text's rows that is kept apart, to evaluate on"""
    tokenizer: str | None = None
    """folder of the tokenizer; the model's own by default"""
    pack: Literal["join", "documents", "off"] | None = None
    """documents joined to whole rows, each in rows of its own, or one row each; off where some tokens do not count"""
    lengths: int = Field(default=1, ge=1, le=16)
    """to how many lengths rows of --pack documents or off are padded, batch by batch"""
    mask: float = Field(default=0.15, gt=0, lt=1)
    """share of the tokens that a masked language model has to find again"""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """images and lines of text that cannot be read"""
    epoch_images: int | None = Field(default=None, ge=1)
    """images of an epoch of synthetic data; ImageNet's by default"""

    @property
    def folders(self) -> list[str]:
        """Where data is read from; none for what is made up."""
        given = [each for each in (self.data, self.evaluation_data) if each not in (None, SYNTHETIC)]
        plain = (each.removeprefix(TEXT).removeprefix(TOKENS) for each in given if each is not None)
        return [str(Path(each.split(":")[1]).parent) if each.startswith(PYTHON) else each for each in plain]

    @property
    def is_text(self) -> bool:
        """Whether the rows are tokens, of text or made of it before."""
        return self.data.startswith((TEXT, TOKENS))


@dataclass(frozen=True, kw_only=True)
class PlanChoice(PlanOptions):
    """A plan file, or what shapes a plan."""

    file: Path | None = None
    """a plan file instead of all of these"""


@schema(error=UsageError)
class JobOptions:
    """What a person asks of a run: how long it goes on, what it tells and what it saves."""

    steps: int | None = Field(default=None, ge=1)
    """optimizer steps, at most; 20 where no epochs are given"""
    warm_up: int = Field(default=2, ge=0)
    """first steps that are not measured"""
    log_every: int = Field(default=10, ge=1)
    """steps between log lines"""
    log_format: LogFormat = "text"
    """log lines with names, as JSON, or as the original benchmark wrote them"""
    evaluate_every: int | None = Field(default=None, ge=1)
    """epochs between evaluations; one comes at the end as well"""
    sinks: tuple[SinkName, ...] = ()
    """where figures go beside the run folder's events and summary.csv"""
    check_replicas: int = Field(default=100, ge=0)
    """steps between comparisons of replicas' weights by hashes, and of workers' pace with the prediction; 0: none"""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """steps between checkpoints, in the folder of --out; else only a signal that ends the run saves one"""
    keep: int = Field(default=3, ge=1)
    """checkpoints that are kept, the newest ones"""
    checkpoints: str | None = None
    """where each checkpoint is copied to: s3://BUCKET/FOLDER, what else fsspec opens, or a mounted folder"""
    save_final: bool = True
    """save the last step, even where no other is: without it the trained weights end with the workers"""
    resume: str | None = None
    """auto, or the folder or the URL of a run or of a checkpoint"""
    overwrite: bool = False
    """remove the run that is in the folder first"""
    max_restarts: int = Field(default=0, ge=0)
    """times that a run whose worker died starts again by itself, from its last checkpoint"""
    replan: bool = False
    """go on without a device that failed for good"""
    nnodes: str | None = None
    """least and most hosts, such as 2:4: waits for those that are lost, then goes on with those that are there"""
    wait_for_hosts_s: float = Field(default=60.0, ge=0)
    """seconds that hosts which are lost are waited for"""

    def __post_init__(self) -> None:
        if self.nnodes is None:
            return
        if re.fullmatch(r"[1-9]\d{0,3}(:[1-9]\d{0,3})?", self.nnodes, re.ASCII) is None or sorted(self.host_limits) != [
            *self.host_limits
        ]:
            raise UsageError(f"--nnodes is {shown(self.nnodes)}: expected the least and the most hosts, such as 2:4")
        if self.replan:
            what = "--nnodes goes on with the hosts that are there, --replan without what failed"
            raise UsageError(what, "give one of them")

    @property
    def host_limits(self) -> tuple[int, int]:
        """The least and the most hosts."""
        least, _, most = (self.nnodes or "1").partition(":")
        return int(least), int(most or least)


@schema(error=UsageError)
class Where:
    """Which devices and hosts compute, and where the run leaves its files."""

    device: Literal["cpu", "cuda"] | None = None
    """cuda where there is one if left out"""
    devices: int | None = Field(default=None, ge=1)
    """local devices for data parallelism without a placement"""
    share: int = Field(default=1, ge=1)
    """workers that share one card, under CUDA MPS where it can be started"""
    nodes: str | None = None
    """hosts to start over ssh, such as host1,host2"""
    remote_python: str | None = None
    """the Python of those hosts; by default the path of the one that runs here"""
    out: Path | None = None
    """folder for logs and the record"""


@schema(error=UsageError)
class Rehearsal:
    """What plays the part of the hosts in a rehearsal."""

    cluster: str | None = None
    """a cluster's name or file: hosts with one device, links and CPU shares"""
    slices: int | None = Field(default=None, ge=1)
    """cut one card into so many workers, instead of --cluster"""
    rate: str | None = None
    """with --slices: how fast each slice sends, such as 1gbit or 125e6 (bytes/s)"""
    measure: bool = False
    """measure layers and links inside the hosts first, plan with them, predict"""


@dataclass(frozen=True, kw_only=True)
class Config(Saved):
    """Everything that a run is told."""

    FORMAT: ClassVar[str] = "stagewright.config"

    model: ModelOptions
    data: DataOptions = field(default_factory=DataOptions)
    plan: PlanChoice = field(default_factory=PlanChoice)
    recipe: RecipeFile = field(default_factory=RecipeFile)
    settings: Computing = field(default_factory=Computing)
    job: JobOptions = field(default_factory=JobOptions)
    where: Where = field(default_factory=Where)
    rehearsal: Rehearsal = field(default_factory=Rehearsal)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values by section and key, which `--config` reads."""
        plain: dict[str, Any] = {"format": self.FORMAT, "version": self.VERSION}
        for name, cls in SECTIONS.items():
            values = adapter(cls).dump_python(getattr(self, name), mode="json")
            plain[name] = {key.key: values[key.name] for key in section_keys(cls)}
        if self.rehearsal == Rehearsal():
            del plain["rehearsal"]
        return plain

    def words(self, folder: Path) -> list[str]:
        """What follows `stagewright` on the command line of a worker of the run in a folder."""
        return ["train" if self.rehearsal == Rehearsal() else "rehearse", "--config", str(folder / CONFIG_FILE)]

    def command(self, folder: Path) -> list[str]:
        """The command of such a worker on this machine."""
        return [sys.executable, "-m", "stagewright", *self.words(folder)]

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """The configuration in a file."""
        return make_config(Path(path))


SECTIONS: Mapping[str, type] = {
    "model": ModelOptions, "data": DataOptions, "plan": PlanChoice, "recipe": RecipeFile, "settings": Computing,
    "job": JobOptions, "where": Where, "rehearsal": Rehearsal,
}  # fmt: skip
NO_OPTION = (
    "model.name", "recipe.name", "recipe.about", "recipe.rate_batch", "recipe.batch_per_device",
    "recipe.evaluate_every", "settings.loss_scale", "settings.scale_growth_steps", "settings.trace_steps",
)  # fmt: skip
"""Keys that no option has: the name is an argument, the plan has the batch, and the job says how often to evaluate."""
_REPLACES = {
    ("plan", "batch"): ("plan", "batch_per_device"), ("plan", "batch_per_device"): ("plan", "batch"),
    ("plan", "ratio"): ("plan", "cut"), ("plan", "cut"): ("plan", "ratio"), ("job", "steps"): ("recipe", "epochs"),
    ("recipe", "learning_rate"): ("recipe", "rate_batch"),
}  # fmt: skip
"""Who says the one and not the other does without what others said of the other."""
_LIKE = ("recipe", "like")
"""The recipe whose values hold where the section says nothing; the option --recipe."""


def make_config(*layers: _Layer | Path) -> Config:
    """The configuration that these values and files make, the later over the earlier."""
    merged: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for each in layers:
        layer = _read_layer(each) if isinstance(each, Path) else each
        given = {(name, key): value for name, values in layer.items() for key, value in values.items()}
        like = given.pop(_LIKE, None)
        if like is not None:
            recipe = RecipeFile.find(like).to_dict()
            merged["recipe"] = {key: value for key, value in recipe.items() if key not in ("format", "version")}
        for (name, key), value in given.items():
            merged[name][key] = value
            other = _REPLACES.get((name, key))
            if other is not None and value is not None and other not in given:
                merged[other[0]].pop(other[1], None)
    if "name" not in merged["model"]:
        raise UsageError(
            "missing argument 'MODEL'", "name one of `stagewright models`, hf:FOLDER or python:FILE.py:FUNCTION"
        )
    return Config(**{name: read_section(cls, merged[name]) for name, cls in SECTIONS.items()})


def _read_layer(path: Path) -> _Layer:
    """The values in a file, each checked; a mistake is named with the file and the key."""
    plain = check_head(read_plain(path), Config.FORMAT, Config.VERSION, str(path))
    if isinstance(plain.get("recipe"), str):
        plain["recipe"] = {"like": plain["recipe"]}
    for name, values in plain.items():
        if name not in SECTIONS:
            raise FileError(f"{path}: key {name} is unknown: expected one of {', '.join(SECTIONS)}")
        if not isinstance(values, dict):
            raise FileError(f"{path}: key {name} is {shown(values)}: expected its keys and values")
        own = {key: value for key, value in values.items() if (name, key) != _LIKE}
        needed = {"name": "any"} if name == "model" else {}
        read_section(SECTIONS[name], {**needed, **own}, where=f"{path}: key {name}.")
    return plain


@schema(error=UsageError)
class Job(JobOptions):
    """The same for a model, data and a plan, which say how many steps and images that comes to."""

    name: str = "train"
    steps: int = Field(default=20, ge=1)
    """Optimizer steps in all."""
    steps_per_epoch: int | None = Field(default=None, ge=1)
    """None where the data has no epochs."""
    epoch_images: int | None = Field(default=None, ge=1)
    evaluation_rows: int = Field(default=0, ge=0)
    """How many images an evaluation has."""
    first_step: int = Field(default=0, ge=0)
    """Where a resumed run goes on."""
    only_evaluates: bool = False
    """Trains nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluate_every is not None and self.evaluation_rows == 0:
            raise UsageError("evaluate_every is given, but evaluation_rows is 0", "say how many images there are")

    def with_some_measured(self) -> Job:
        """The job with a warm-up that leaves at least one of its steps to measure."""
        left = self.steps - self.first_step
        return replace(self, warm_up=min(self.warm_up, max(left - 1, 0)))

    def epoch_of(self, step: int) -> int:
        """The epoch that the step before the `step`-th update belongs to, 0 where the data has none."""
        return max(0, step - 1) // self.steps_per_epoch if self.steps_per_epoch else 0

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation comes after a step: at the end, and every so many epochs."""
        stride = (self.evaluate_every or 0) * (self.steps_per_epoch or 0)
        return step == self.steps or (stride > 0 and step % stride == 0)

    def parts(self, *, each_epoch: bool = False) -> list[tuple[int, int]]:
        """(first step, end) of the stretches that run without a stop: between evaluations or epochs, or all at once."""
        stride = (1 if each_epoch else self.evaluate_every or 0) * (self.steps_per_epoch or 0)
        if not stride:
            return [(self.first_step, self.steps)] if self.first_step < self.steps else []
        edges = [self.first_step, *range((self.first_step // stride + 1) * stride, self.steps, stride), self.steps]
        return [(start, stop) for start, stop in zip(edges, edges[1:]) if start < stop]
