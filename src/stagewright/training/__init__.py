"""Training runs: recipes, logs, the loop over steps and epochs."""

from stagewright.training.job import Job
from stagewright.training.optimizers import Recipe
from stagewright.training.recipes import RecipeFile, find_recipe
from stagewright.training.start import train

__all__ = ["Job", "Recipe", "RecipeFile", "find_recipe", "train"]
