"""How a run computes: what the plan and the schedule leave open. The defaults of the options live here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from stagewright.errors import UsageError
from stagewright.profile import Precision
from stagewright.runtime.corrections import CORRECTIONS
from stagewright.schema import schema

_OnNan = Literal["stop", "skip"]


def _known(name: str) -> str:
    if name not in CORRECTIONS:
        raise ValueError(f"expected one of {', '.join(CORRECTIONS)}")
    return name


_Correction = Annotated[str, AfterValidator(_known)]


@schema(error=UsageError)
class Computing:
    """What a person chooses of them, apart from what the recipe and the place of a run say."""

    loss_scale: float = Field(default=2.0**15, gt=0)
    """The first loss scale of fp16."""
    scale_growth_steps: int = Field(default=2000, ge=1)
    """After how many finite steps the loss scale doubles."""
    sync_batch_norm: bool = False
    """batch norm over all replicas' rows"""
    channels_last: bool = False
    """images with their channels last in memory"""
    compile: bool = False
    """compile the stages with torch.compile"""
    seed: int = 0
    """of the first weights, the order of the data and what is drawn at random"""
    correct: tuple[_Correction, ...] = Field(default=("none",), min_length=1)
    """of stale weights, for all stages or one a stage: none, predict, nesterov, slow-predict, error-feedback or rescale
    (docs/staleness.md)"""
    rescale_steps: int | None = Field(default=None, ge=1)
    """steps until --correct rescale has the whole learning rate; a quarter of all by default"""
    on_nan: _OnNan = "stop"
    """numbers that are not finite: stop the run, or skip the step"""
    self_check: bool = True
    """compare the first step's gradients with plain autograd's"""
    transport: Literal["auto", "nccl", "staged"] = "auto"
    """between cards: nccl, staged in pinned memory, or auto: staged where cards are shared"""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads a worker; by default its share of the cores"""
    timeout_s: float = Field(default=300.0, gt=0)
    """seconds that anyone waits for anyone"""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """seconds that workers may take to start: many at once on few cores load slowly"""
    save_timeout_s: float = Field(default=1800.0, gt=0)
    """seconds that a checkpoint may take to be written, or to be read again"""
    trace_steps: int = Field(default=3, ge=0)
    """How many of the last steps are kept as spans."""


@schema(error=UsageError)
class Settings(Computing):
    """Options of a run that change how it computes, not what."""

    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"
    clip_norm: float | None = Field(default=None, gt=0)
    """The largest norm of all stages' gradients together."""

    @property
    def agrees(self) -> bool:
        """Whether updates need a word from every worker: fp16 for overflow, clipping for the norm, skips for NaN."""
        return self.precision == "fp16" or self.clip_norm is not None or self.on_nan == "skip"

    def correction_of(self, stage: int) -> str:
        """The correction of a stage; of one without its own that of the last."""
        return self.correct[min(stage, len(self.correct) - 1)]
