"""A model of the transformers library by its folder: `hf:FOLDER`, or `hf:NAME` where its files are at hand.

    config.json ─▶ shapes alone ─▶ layers      a worker reads the tensors of its own stage when it needs them

Its blocks run their own code in the stages: a trace follows only the code around them. Only tensors are inputs, by the
names that the model calls them, and its scores are its one output.
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from stagewright.errors import ModelError, UsageError
from stagewright.models.layered import Layered, Learns
from stagewright.models.loss import Loss, cross_entropy_sum, smoothed, token_cross_entropy_sum
from stagewright.models.making import make_layered
from stagewright.models.pretrained import Pretrained
from stagewright.models.tracing import first_line

HUGGING_FACE = "hf:"
"""How the names of these models begin."""

_CONFIG = "config.json"
_BESIDE = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*.model",
)  # fmt: skip
"""What a folder has beside the weights and the configuration, and a trained model has too."""
Adapt = Callable[[nn.Module], nn.Module]
"""Changes a model that has shapes alone, before its layers are looked for: adapters are put in here."""


def _scores(model: Any, **inputs: Tensor) -> Any:
    """What transformers' own forward makes of the inputs, without the rest."""
    own: Any = type(model).__mro__[1]
    return own.forward(model, **inputs, **({"use_cache": False} if own.can_generate() else {})).logits


def _causal(self: Any, input_ids: Tensor) -> Any:
    return _scores(self, input_ids=input_ids)


def _encoding(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
    return _scores(self, input_ids=input_ids, attention_mask=attention_mask)


def _translating(self: Any, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor) -> Any:
    return _scores(self, input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids)


@dataclass(frozen=True)
class _Task:
    """What a model is for: how its name ends, transformers' class for it, how a stage calls it, its loss and lesson."""

    heads: tuple[str, ...]
    auto: str
    forward: Callable[..., Any]
    loss: Loss
    learns: Learns = "next"

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.forward).parameters)[1:]


_CLASSIFICATION = _Task(
    ("ForSequenceClassification",), "AutoModelForSequenceClassification", _encoding, cross_entropy_sum()
)
_CAUSAL = _Task(("ForCausalLM", "LMHeadModel"), "AutoModelForCausalLM", _causal, token_cross_entropy_sum(shifts=True))
_MASKED = _Task(("ForMaskedLM",), "AutoModelForMaskedLM", _encoding, token_cross_entropy_sum(), "masked")
_SEQ2SEQ = _Task(
    ("ForConditionalGeneration",), "AutoModelForSeq2SeqLM", _translating, token_cross_entropy_sum(), "answer"
)
_TASKS = (_CAUSAL, _MASKED, _CLASSIFICATION, _SEQ2SEQ)


def build_pretrained(
    name: str, *, seed: int = 0, num_classes: int | None = None, sequence_length: int | None = None,
    from_scratch: bool = False, label_smoothing: float = 0.0, adapt: Adapt | None = None, check: bool = True,
) -> Layered:  # fmt: skip
    """The layers of the model in a folder, on the device "meta", and where its weights are.

    With `num_classes` it tells rows apart: the folder's own head, or a new one where it has another.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        told = f"{name} needs transformers, which is not installed"
        raise UsageError(told, "pip install 'stagewright[hf]'") from None
    folder, config, task = _opened(name, num_classes)
    model = _skeleton(task, config)
    weights = Pretrained(model, folder, seed=seed, from_scratch=from_scratch)
    if weights.drawn:
        more = f" and {len(weights.drawn) - 1} more" if len(weights.drawn) > 1 else ""
        warnings.warn(f"{folder} has no '{weights.drawn[0]}'{more}: drawn instead", stacklevel=3)
    loss = smoothed(task.loss, label_smoothing) if label_smoothing else task.loss
    inputs, labels = _sample(task, config, sequence_length)
    model = adapt(model) if adapt is not None else model
    with _mask_left_out():
        layered = make_layered(model, (), inputs, loss=loss, targets=(labels,), check=check, by_blocks=True)
    again = layered.again and _mask_left_out()(layered.again)
    start = getattr(config, "decoder_start_token_id", None)
    return layered.changed(weights=weights, again=again, learns=task.learns, answer_start=start)


def _opened(name: str, num_classes: int | None) -> tuple[Path, Any, _Task]:
    """The folder of a model, what config.json says of it, and what it is for: telling `num_classes` apart, if given."""
    from transformers import AutoConfig

    folder = _find_folder(name.removeprefix(HUGGING_FACE))
    if not (folder / _CONFIG).is_file():
        raise ModelError(f"{folder} has no {_CONFIG}", "give a folder that save_pretrained wrote")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # JSON's, transformers' and its models' own
        raise ModelError(
            f"{folder / _CONFIG} cannot be read: {first_line(error)}", "is it of another version?"
        ) from None
    if num_classes:
        config.num_labels = num_classes
        return folder, config, _CLASSIFICATION
    named = (getattr(config, "architectures", None) or [""])[0]
    for task in _TASKS:
        if named.endswith(task.heads):
            return folder, config, task
    if named.endswith("Model") or not named:  # one without a head
        return folder, config, _SEQ2SEQ if config.is_encoder_decoder else _CAUSAL
    raise ModelError(
        f"{folder / _CONFIG} is of a {named}, which is no language model that is known here",
        f"there are those that end in {', '.join(end for each in _TASKS for end in each.heads)}",
    )


def _find_folder(name: str) -> Path:
    """The folder of a model: a path, or that of a name of the Hub whose files are here or can be fetched."""
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise ModelError(f"hf:{name}: there is no such folder", "give one that holds config.json and safetensors files")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception:  # each of the many reasons not to reach it has a class of its own
        raise ModelError(
            f"hf:{name} is no folder, and no model of that name is here or can be fetched from the Hub now",
            "give the path of a folder with config.json and safetensors files",
        ) from None


def save_folder(name: str, tensors: Mapping[str, Tensor], out: Path, *, num_classes: int | None = None) -> None:
    """Writes a trained model as transformers does: configuration, sharded safetensors, and what else its folder had."""
    import transformers

    folder, config, task = _opened(name, num_classes)
    config.dtype = next((each.dtype for each in tensors.values() if each.is_floating_point()), torch.float32)
    with torch.device("meta"):
        model = getattr(transformers, task.auto).from_config(config, dtype=config.dtype)
    own = model.state_dict()
    lost = sorted((own.keys() ^ tensors.keys()) - own.keys()) or sorted(own.keys() - tensors.keys())
    if lost:
        raise ModelError(f"'{lost[0]}' is of the run or of {folder} alone: the folder has changed since", "train again")
    model.save_pretrained(out, state_dict=dict(tensors))
    for pattern in _BESIDE:
        for file in folder.glob(pattern):
            shutil.copy(file, out / file.name)


def _skeleton(task: _Task, config: Any) -> nn.Module:
    """The model with shapes and no weights, in single precision, taking its inputs by name and giving its scores."""
    import transformers

    if getattr(config, "output_router_logits", False):
        raise ModelError(
            "output_router_logits is on: the balance of the router is over all rows of a batch, which no stage sees",
            'set "output_router_logits": false in config.json',
        )
    config.use_cache = False
    config.dtype = torch.float32
    if task is _CLASSIFICATION and config.pad_token_id is None:
        raise ModelError(
            "config.json names no pad_token_id, so a classifier cannot tell where rows end", "set pad_token_id in it"
        )
    try:
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, task.auto).from_config(config, dtype=torch.float32)
    except Exception as error:
        told = f"transformers cannot build a {config.model_type} as {task.auto}: {first_line(error)}"
        raise ModelError(told) from error
    if config._experts_implementation == "grouped_mm":
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register("grouped_mm_or_shapes", _experts)
        config._experts_implementation = "grouped_mm_or_shapes"
    model.train()
    for path, module in model.named_modules():  # layers that are dropped as a whole
        rate = getattr(module, "layerdrop", None)
        if rate:
            raise ModelError(
                f"layerdrop = {rate} drops layers of '{path}' at random", 'set "layerdrop": 0 in config.json'
            )
        if rate is not None:  # it would draw a number for each layer all the same, and branch on it
            _override(module, training=property(lambda self: False, lambda self, is_on: None))
            vars(module).pop("training", None)
    _override(model, forward=task.forward)
    return model


def _override(module: nn.Module, **members: Any) -> None:
    """Gives one module members that others of its class do not get."""
    own = type(module)
    module.__class__ = type(own.__name__, (own,), {**members, "__module__": own.__module__})


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Any:
    """A mixture's experts as transformers computes them; on shapes alone, and in fp64, its kernel does not run."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    way = "batched_mm" if hidden.device.type == "meta" or hidden.dtype == torch.float64 else "grouped_mm"
    return ALL_EXPERTS_FUNCTIONS[way](module, hidden, chosen, weights)


def _sample(task: _Task, config: Any, length: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """A row of inputs and its labels, shapes alone."""
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if length is not None and longest is not None and length > longest:
        raise ModelError(
            f"a row of {length} tokens is longer than the {longest} that {config.model_type} has positions for",
            f"take --sequence-length {longest} or less",
        )
    unasked = min(longest or 1024, 1024)  # the most that a row has where nobody says how many
    tokens = torch.empty(1, length or unasked, dtype=torch.int64, device="meta")
    labels = tokens[:, 0] if task is _CLASSIFICATION else tokens
    return {name: torch.empty_like(tokens) for name in task.inputs}, labels


@contextmanager
def _mask_left_out() -> Iterator[None]:
    """Inside, transformers makes a mask only where attention needs one, as it does when it is not being traced.

    Without a mask attention is torch's fused kernel, causal where the model is.
    """
    with (
        patch("transformers.masking_utils.is_torchdynamo_exporting", return_value=False, create=True),  # newer ones
        patch("transformers.masking_utils.is_tracing", return_value=True),
        patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None),
    ):
        yield
