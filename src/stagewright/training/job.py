"""What a training run is asked to do; the defaults of the options live here."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from stagewright.errors import UsageError
from stagewright.schema import schema
from stagewright.training.sinks import SinkName


@schema(error=UsageError)
class Job:
    """How long a run goes on and what it tells."""

    name: str = "train"
    steps: int = Field(default=20, ge=1)
    """Optimizer steps in all."""
    warm_up: int = Field(default=2, ge=0)
    """Steps that are left out of the measured ones."""
    log_every: int = Field(default=10, ge=1)
    steps_per_epoch: int | None = Field(default=None, ge=1)
    """None where the data has no epochs."""
    epoch_images: int | None = Field(default=None, ge=1)
    evaluate_every: int | None = Field(default=None, ge=1)
    """Evaluate after every so many epochs."""
    evaluation_rows: int = Field(default=0, ge=0)
    """How many images an evaluation has."""
    first_step: int = Field(default=0, ge=0)
    """Where a resumed run goes on."""
    sinks: tuple[SinkName, ...] = ()
    """Where figures go beside the run folder's events and summary.csv."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; None saves only when a signal ends the run."""
    keep: int = Field(default=3, ge=1)
    """How many checkpoints are kept, the newest ones."""
    save_final: bool = True
    """Whether the last step is saved even where no other is: without it the trained weights end with the workers."""
    resume: str | None = None
    """`auto`: from the newest good checkpoint of the run's folder; else a folder of a run or of one checkpoint."""
    overwrite: bool = False
    """Whether a run that is in the folder already is removed first."""
    max_restarts: int = Field(default=0, ge=0)
    """How often a run whose worker died is started again by itself, from its last checkpoint."""
    replan: bool = False
    """Whether a run that cannot be started again goes on without the device that failed it."""

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
