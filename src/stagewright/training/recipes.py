"""Recipes as files: how a model is trained, counted in epochs and rows a device, whatever the data and the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from stagewright.errors import StagewrightError, UsageError
from stagewright.profile import Precision
from stagewright.schema import Saved, schema
from stagewright.training.optimizers import Optimization, Recipe


@schema(error=UsageError)
class RecipeFile(Optimization, Saved):
    """A recipe in epochs; every option of `stagewright train` of the same name takes the place of a key."""

    FORMAT: ClassVar[str] = "stagewright.recipe"
    ERROR: ClassVar[type[StagewrightError]] = UsageError

    name: str = "plain"
    about: str = ""
    epochs: int | None = Field(default=None, ge=1)
    evaluate_every: int | None = Field(default=None, ge=1)
    """Epochs between evaluations."""
    batch_per_device: int | None = Field(default=None, ge=1)
    precision: Precision = "fp32"
    """fp16 has a dynamic loss scale."""
    clip_norm: float | None = Field(default=None, gt=0)
    rate_batch: int | None = Field(default=None, ge=1)
    """The batch that the learning rate is meant for; with another one the rate changes in proportion."""
    warm_up_epochs: float = Field(default=0.0, ge=0)
    decay_epochs: tuple[int, ...] = ()
    """The epochs after which a `step` decay multiplies the rate by `decay_rate`."""
    crop_area: float = Field(default=0.08, gt=0, le=1)
    """The smallest share of an image that a random crop keeps."""

    @property
    def needs_epochs(self) -> bool:
        """Whether anything is counted in epochs."""
        return bool(self.epochs or self.warm_up_epochs or self.decay_epochs)

    def rate(self, batch: int) -> float:
        """The learning rate for a batch.

        rate · batch / rate_batch        Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.1
        """
        return self.learning_rate * batch / (self.rate_batch or batch)

    def in_steps(self, *, batch: int, per_epoch: int | None, total_steps: int, **given: Any) -> Recipe:
        """The same recipe for a run of so many steps; `per_epoch` is how many make an epoch.

        `given` may name warm_up_steps and decay_steps instead of what the epochs come to.
        """
        values = {field.name: getattr(self, field.name) for field in fields(Optimization)}
        counted = {
            "learning_rate": self.rate(batch),
            "warm_up_steps": round(self.warm_up_epochs * (per_epoch or 0)),
            "decay_steps": tuple(epoch * (per_epoch or 0) for epoch in self.decay_epochs),
        }
        chosen = {key: value for key, value in given.items() if value is not None}
        return Recipe(**{**values, **counted, **chosen}, total_steps=total_steps)


_KEYS = tuple(field.name for field in fields(RecipeFile) if field.name not in ("name", "about", "rate_batch"))
"""What options of `stagewright train` may override."""


def ready_made_recipes() -> dict[str, Path]:
    """The recipe files that come with the package, by name."""
    package = Path(__file__).parents[1]
    folders = (package / "recipes", package.parents[1] / "recipes")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name_or_file: str) -> RecipeFile:
    """The recipe in a file, or the ready-made one of that name."""
    known = ready_made_recipes()
    if name_or_file in known:
        return RecipeFile.load(known[name_or_file])
    if Path(name_or_file).suffix in (".yaml", ".yml", ".json"):
        return RecipeFile.load(name_or_file)
    raise UsageError(
        f"no recipe is named {name_or_file!r}; ready-made: {', '.join(known) or 'none'}",
        "give one of these names, or a .yaml or .json file",
    )


def with_options(recipe: RecipeFile, options: Mapping[str, Any]) -> RecipeFile:
    """The recipe with what the options say in its place; an option left at None says nothing."""
    given = {key: options[key] for key in _KEYS if options.get(key) is not None}
    if "learning_rate" in given:
        given["rate_batch"] = None
    if options.get("steps") is not None and "epochs" not in given:
        given["epochs"] = None
    return replace(recipe, **given)
