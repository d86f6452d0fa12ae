"""Training runs: recipes, logs, the loop over steps and epochs."""

from stagewright.training.job import Job
from stagewright.training.loop import train
from stagewright.training.optimizers import Recipe

__all__ = ["Job", "Recipe", "train"]
