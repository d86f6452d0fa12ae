"""What a training run is asked to do; the defaults of the options live here."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from stagewright.errors import UsageError
from stagewright.schema import schema
from stagewright.training.events import SinkName


@schema(error=UsageError)
class JobOptions:
    """What a person asks of a run: how long it goes on, what it tells and what it saves."""

    steps: int | None = Field(default=None, ge=1)
    """optimizer steps, at most; 20 where no epochs are given"""
    warm_up: int = Field(default=2, ge=0)
    """first steps that are not measured"""
    log_every: int = Field(default=10, ge=1)
    """steps between log lines"""
    evaluate_every: int | None = Field(default=None, ge=1)
    """epochs between evaluations; one comes at the end as well"""
    sinks: tuple[SinkName, ...] = ()
    """where figures go beside the run folder's events and summary.csv"""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """steps between checkpoints, in the folder of --out; else only a signal that ends the run saves one"""
    keep: int = Field(default=3, ge=1)
    """checkpoints that are kept, the newest ones"""
    save_final: bool = True
    """save the last step, even where no other is: without it the trained weights end with the workers"""
    resume: str | None = None
    """auto, or the folder of a run or of a checkpoint"""
    overwrite: bool = False
    """remove the run that is in the folder first"""
    max_restarts: int = Field(default=0, ge=0)
    """times that a run whose worker died starts again by itself, from its last checkpoint"""
    replan: bool = False
    """go on without a device that failed for good"""


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

    def __post_init__(self) -> None:
        if self.evaluate_every is not None and self.evaluation_rows == 0:
            raise UsageError("evaluate_every is given, but evaluation_rows is 0", "say how many images there are")

    def with_some_measured(self) -> Job:
        """The job with a warm-up that leaves at least one of its steps to measure."""
        left = self.steps - self.first_step
        return replace(self, warm_up=min(self.warm_up, max(left - 1, 0)))

    def epoch_of(self, step: int) -> int:
        """The epoch that the step before the `step`-th update belongs to, 0 where the data has none."""
        return (step - 1) // self.steps_per_epoch if self.steps_per_epoch else 0

    def parts(self) -> list[tuple[int, int]]:
        """(first step, end) of the stretches that run without a stop: between evaluations, or all at once."""
        if self.evaluate_every is None or self.steps_per_epoch is None:
            return [(self.first_step, self.steps)] if self.first_step < self.steps else []
        stride = self.evaluate_every * self.steps_per_epoch
        edges = [self.first_step, *range((self.first_step // stride + 1) * stride, self.steps, stride), self.steps]
        return [(start, stop) for start, stop in zip(edges, edges[1:]) if start < stop]
