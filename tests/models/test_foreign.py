"""Models that nobody here wrote, cut at every place they offer: outputs, gradients and buffers stay, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.models import Layered, make_layered

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

ROWS, OTHER_ROWS = 2, 3


@dataclass(frozen=True)
class Foreign:
    """A model of another library, how it is called, and the fewest cuts it must offer."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    min_cuts: int
    constants: dict[str, Any]


def _pixels(size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {"pixel_values": torch.randn(rows, 3, size, size)}


def _tokens(rows: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, 8, dtype=torch.int64)
    mask[0, 6:] = 0
    return {"input_ids": torch.randint(0, 50, (rows, 8)), "attention_mask": mask}


def _noise(rows: int) -> dict[str, Tensor]:
    return {"sample": torch.randn(rows, 3, 16, 16), "timestep": torch.randint(0, 100, (rows,))}


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def _convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8], depths=[2, 2], num_stages=2, num_labels=5, image_size=32)
    return transformers.ConvNextForImageClassification(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


def _unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=2,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
    )


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
    )
    return transformers.BertForSequenceClassification(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2, use_cache=False, tie_word_embeddings=False
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config)


MODELS = {
    "transformers ResNet": Foreign(_resnet, _pixels(32), 5, {}),
    "transformers ConvNeXt": Foreign(_convnext, _pixels(32), 5, {}),
    "transformers ViT": Foreign(_vit, _pixels(32), 4, {}),
    "transformers BERT": Foreign(_bert, _tokens, 4, {}),
    "transformers GPT-2": Foreign(_gpt2, _tokens, 4, {}),
    "transformers Llama": Foreign(_llama, _tokens, 4, {}),
    "diffusers U-Net": Foreign(_unet, _noise, 10, {}),
}


def squares(*outputs: Tensor) -> Tensor:
    """A loss for any model: half the sum of squares of all outputs."""
    return torch.stack([output.square().sum() / 2 for output in outputs]).sum()


def layer(foreign: Foreign) -> Layered:
    torch.manual_seed(0)
    model = foreign.build().train()
    return make_layered(model, (), foreign.inputs(ROWS) | foreign.constants, loss=squares)


@pytest.mark.parametrize("name", MODELS)
def test_cutting_anywhere_changes_nothing(
    name: str, run_whole: Any, run_cut: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = MODELS[name]
    layered = layer(foreign)
    cuts = layered.cuts()
    assert len(cuts) >= foreign.min_cuts, layered.names

    inputs = foreign.inputs(OTHER_ROWS)
    whole = run_whole(layered, lambda model: model(**inputs).to_tuple(), squares, ())
    rng = random.Random(0)
    several = [sorted(rng.sample(cuts, rng.randint(2, len(cuts)))) for _ in range(3)]
    for chosen in [*((cut,) for cut in cuts), *several, cuts]:
        found = run_cut(layered, chosen, tuple(inputs.values()), ())
        assert not whole.differences(found), (name, [layered.names[cut] for cut in chosen])
    with capsys.disabled():
        print(f"\n  {name:24} {layered.num_layers:3} layers, {len(cuts):3} cuts, each checked", end="")


def test_a_stage_runs_on_the_device_of_its_inputs() -> None:
    """Positions and masks are made where the stage runs, not where the model was traced."""
    layered = layer(MODELS["transformers Llama"])
    stage = copy.deepcopy(layered.stage(1, 3)).to("meta")
    inputs = [torch.empty(5, *spec.shape_per_row, dtype=spec.dtype, device="meta") for spec in stage.inputs]
    outputs = stage(*inputs)
    assert {(output.device.type, output.size(0)) for output in outputs} == {("meta", 5)}


def test_tied_weights_are_known_by_name() -> None:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    layered = make_layered(transformers.GPT2LMHeadModel(config), (), _tokens(ROWS), loss=squares)
    assert layered.tied == (("transformer.wte.weight", (0, 5)),)
    assert layered.cuts() == (1, 2, 3, 4, 5, 6)


def test_weights_shared_by_all_layers_make_one_layer() -> None:
    config = transformers.AlbertConfig(
        vocab_size=50,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
    )
    names = make_layered(transformers.AlbertModel(config), (), _tokens(ROWS)).names
    assert "encoder.albert_layer_groups.0" in names
    assert len(names) == 4
