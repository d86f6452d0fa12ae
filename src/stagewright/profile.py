"""What a model costs on one device, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import mul
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field

from stagewright.errors import ProfileError, StagewrightError
from stagewright.schema import Saved, schema

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
ROW_BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


@schema(error=ProfileError)
class LayerProfile:
    """One layer; its seconds stand beside the profile's batch sizes, its bytes are for one row."""

    name: str = Field(min_length=1)
    kind: str = "layer"
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    spread: float = Field(default=0.0, ge=0)
    """Half the distance of the quartiles, as a share of the median."""
    weight_share: float = Field(default=0.5, ge=0, le=1)
    """The share of backward that only the weights' gradients need, which zero-bubble orders put off."""
    weight_s: tuple[float, ...] = ()
    """The seconds of that part, where they were measured: then they count, and the share does not."""
    output_bytes: float = Field(ge=0)
    """Bytes of its output, a row."""
    saved_bytes: float = Field(ge=0)
    """Bytes that backward needs and forward leaves behind, a row."""
    parameter_bytes: int = Field(ge=0)
    trained_bytes: Mapping[str, int] | None = None
    """Of these, those that are trained, by what they are for (see models/counts.py); None: all, as those of a matrix
    where most of the layer's operations are a matrix product."""
    state_bytes: int | None = Field(default=None, ge=0)
    """Bytes that the optimizer keeps for them; as many as they have where None."""
    buffer_bytes: int = Field(default=0, ge=0)
    before_bytes: float | None = Field(default=None, ge=0)
    """Bytes of what enters it that layers before it have saved already, a row; None: all, so that a stage that ends
    before it holds nothing more."""
    cast_bytes: int = Field(default=0, ge=0)
    """Bytes of the copies of its weights in the format that it computes in."""
    workspace_bytes: float = Field(default=0.0, ge=0)
    """Bytes that come and go while it runs, a row."""
    scratch_bytes: int = Field(default=0, ge=0)
    """The same, whatever the rows."""
    flops: float = Field(default=0.0, ge=0)
    """Operations of its forward, a row."""
    inputs: tuple[str, ...] | None = None
    """The layers whose outputs it reads; None is the layer before it."""
    cuttable: bool = True
    """Whether a stage may begin with it: not where it shares weights with a layer before it."""

    def __post_init__(self) -> None:
        for key, seconds in self.timed.items():
            if any(value < 0 for value in seconds):
                raise ProfileError(f"layer {self.name}: key {key} is {min(seconds)}: expected no negative time")

    @property
    def timed(self) -> dict[str, tuple[float, ...]]:
        """All its seconds, by key; those that were not measured are left out."""
        weight = {"weight_s": self.weight_s} if self.weight_s else {}
        return {"forward_s": self.forward_s, "backward_s": self.backward_s, **weight}

    @property
    def by_role(self) -> Mapping[str, int]:
        """The bytes of the trained parameters, by role."""
        if self.trained_bytes is not None:
            return self.trained_bytes
        return {"matrix" if self.kind == "matmul" else "other": self.parameter_bytes}

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the trained parameters."""
        return sum(self.by_role.values())

    def with_times(self, times: Mapping[str, tuple[float, ...]]) -> LayerProfile:
        """The layer with other seconds, by key."""
        weight_s = times.get("weight_s", ())
        return replace(self, forward_s=times["forward_s"], backward_s=times["backward_s"], weight_s=weight_s)


@schema(error=ProfileError)
class Profile(Saved):
    """All layers of a model, in order; the last one is the loss."""

    FORMAT: ClassVar[str] = "stagewright.profile"
    ERROR: ClassVar[type[StagewrightError]] = ProfileError

    model: str
    device: str
    """The kind of device it holds for."""
    precision: Precision = "fp32"
    source: Literal["measured", "analytic", "imported"]
    batch_sizes: tuple[int, ...] = Field(min_length=1)
    """The numbers of rows that were timed, ascending; other sizes are interpolated."""
    layers: tuple[LayerProfile, ...] = Field(min_length=1)
    input_bytes: float = Field(default=0.0, ge=0)
    """Bytes of the model's input, a row."""
    sample_name: Literal["images", "samples"] = "samples"
    """What a row is called."""
    sample_tokens: float | None = Field(default=None, gt=0)
    """Tokens of a row, where rows are text."""
    optimizer_s: float = Field(default=0.0, ge=0)
    """One optimizer step over all trained parameters: of SGD with momentum, or of what `with_states` was told."""
    update_scratch: float = Field(default=0.0, ge=0)
    """How many numbers the optimizer takes, while it updates, for each number of a trained parameter."""
    model_s: tuple[float, ...] = ()
    """Forward and backward of the whole model in one piece, at each batch size: the check on the sum of layers."""
    versions: Mapping[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    others: tuple[Profile, ...] = ()
    """The same model's on other kinds of device."""

    def __post_init__(self) -> None:
        self._check_others()
        sizes = self.batch_sizes
        if sizes[0] < 1 or any(later <= before for before, later in zip(sizes, sizes[1:])):
            raise ProfileError(f"key batch_sizes is {list(sizes)}: expected positive numbers, ascending")
        seen: set[str] = set()
        for layer in self.layers:
            if layer.name in seen:
                raise ProfileError(f"layer {layer.name} appears twice: expected names that differ")
            for key, seconds in layer.timed.items():
                if len(seconds) != len(self.batch_sizes):
                    raise ProfileError(
                        f"layer {layer.name}: key {key} has {len(seconds)} values: "
                        f"expected {len(self.batch_sizes)}, one for each of the batch sizes"
                    )
            for name in layer.inputs or ():
                if name not in seen:
                    raise ProfileError(f"layer {layer.name} reads {name!r}, which is no layer before it")
            seen.add(layer.name)

    def _check_others(self) -> None:
        for other in self.others:
            said = f"the profiles of {other.model} on {self.device} and {other.device} "
            if other.precision != self.precision:
                raise ProfileError(f"{said}are in {self.precision} and {other.precision}", "profile both in one")
            if other.names != self.names:
                pairs = zip((*self.names, "none"), (*other.names, "none"))
                here, there = next(pair for pair in pairs if pair[0] != pair[1])
                raise ProfileError(f"{said}are of different models: layer {here} in one is {there} in the other")
        if len(self.by_kind) <= len(self.others):
            raise ProfileError(f"two profiles of {self.model} are of one kind of device", "give one a kind of device")

    @classmethod
    def of_kinds(cls, profiles: Sequence[Profile]) -> Profile:
        """Profiles of one model on several kinds of device as one."""
        first, *more = (each for one in profiles for each in (replace(one, others=()), *one.others))
        return replace(first, others=tuple(more))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The profile in a file; of a folder those in all its files together."""
        files = sorted(Path(path).glob("*.json")) if Path(path).is_dir() else []
        if not files:
            return super().load(path)
        return cls.of_kinds([super(Profile, cls).load(file) for file in files])  # type: ignore[return-value]

    @property
    def by_kind(self) -> dict[str, Profile]:
        """The profile of each kind of device."""
        return {each.device: each for each in (self, *self.others)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The layers' names, in order."""
        return tuple(layer.name for layer in self.layers)

    def index(self, name: str) -> int:
        """Where the layer of this name stands."""
        if name not in self.names:
            raise ProfileError(f"{self.model} has no layer {name!r}", f"its layers are {', '.join(self.names[:12])} …")
        return self.names.index(name)

    def assumed(self, kind: str) -> Profile:
        """The profile as one of another kind of device, for whoever says that it holds there too."""
        return replace(
            self, device=kind, notes=(*self.notes, f"a profile of {self.device}, assumed to hold for {kind}")
        )

    def with_states(self, states: Callable[[str], float], scratch: float = 0.0) -> Profile:
        """The profile of a run whose optimizer keeps so many numbers for each number of a parameter, by its role, and
        takes `scratch` for each while it updates.

        A step reads weights, gradients and states, and writes weights and states: SGD with momentum, which keeps one,
        goes five times over memory.
        """
        layers = [
            replace(each, state_bytes=round(sum(states(role) * size for role, size in each.by_role.items())))
            for each in self.layers
        ]
        trained, kept = sum(each.gradient_bytes for each in layers), sum(each.state_bytes or 0 for each in layers)
        passes = 3 + 2 * kept / trained if trained else 5.0
        return replace(
            self, layers=tuple(layers), optimizer_s=self.optimizer_s * passes / 5, update_scratch=scratch,
            others=tuple(other.with_states(states, scratch) for other in self.others),
        )  # fmt: skip

    def frozen(self) -> Profile:
        """The profile of a model of which nothing is trained."""
        layers = tuple(replace(each, trained_bytes={}) for each in self.layers)
        return replace(self, layers=layers, others=tuple(other.frozen() for other in self.others))

    def slowed(self, factors: Sequence[float]) -> Profile:
        """The profile with layers that take so many times as long, at each batch size."""
        layers = tuple(
            layer.with_times({key: tuple(map(mul, seconds, factors)) for key, seconds in layer.timed.items()})
            for layer in self.layers
        )
        return replace(self, layers=layers, others=tuple(other.slowed(factors) for other in self.others))
