"""Units that are built alike are looked at once; what is said of each is what looking at every one says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import stagewright as sw
from stagewright.models import Layered, build_model
from stagewright.profiling import facts, memory
from stagewright.profiling.layers import make_pieces, shortened


class Block(nn.Module):
    """A linear layer and dropout."""

    def __init__(self, before: int, after: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(before, after), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), self.dropout, self.training)


def chain(widths: list[int], dropout: float = 0.1) -> Layered:
    """Blocks of these widths, of which the last has this dropout."""
    last = len(widths) - 2
    blocks = [Block(*pair, dropout if at == last else 0.1) for at, pair in enumerate(zip(widths, widths[1:]))]
    return layered(nn.Sequential(*blocks))


def layered(model: nn.Module) -> Layered:
    loss = sw.models.cross_entropy_sum()
    return sw.make_layered(model, (torch.randn(2, 8),), loss=loss, targets=(torch.zeros(2, dtype=torch.long),))


def llama(folder: Path) -> Layered:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
        "max_position_embeddings": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return build_model(f"hf:{folder}", device="meta", sequence_length=16)


def test_two_stand_for_a_run_and_one_that_differs_ends_it() -> None:
    short, places = shortened(make_pieces(chain([8, 8, 8, 8, 8, 8, 4])))
    #        8-8   8-8   8-8   8-8  8-8  8-4  loss
    assert places == (0, 1, 2, 2, 2, 3, 4)  # the first gives no gradient to whoever is before it
    assert [unit.first for unit in short.units] == [0, 1, 2, 5, 6]


def test_a_setting_tells_two_apart() -> None:
    assert shortened(make_pieces(chain([8] * 5, dropout=0.1)))[1] == (0, 1, 2, 2, 3)
    assert shortened(make_pieces(chain([8] * 5, dropout=0.5)))[1] == (0, 1, 2, 3, 4)


def test_whoever_shares_a_weight_stands_for_itself() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[3].weight = model[2].weight  # type: ignore[assignment]
    pieces = make_pieces(layered(model))
    assert shortened(pieces)[1] == tuple(range(len(pieces.units)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt-tiny", "chain"])
def test_facts_are_those_of_looking_at_every_unit(
    name: str, precision: sw.profile.Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = llama(tmp_path) if name == "llama" else chain([8] * 6) if name == "chain" else None
    pieces = make_pieces(made or build_model(name, num_blocks=5), precision)
    short, _ = shortened(pieces)
    assert len(short.units) < len(pieces.units)
    found, work = facts.find_facts(pieces), facts.record_work(pieces, 6)
    for module in (facts, memory):
        monkeypatch.setattr(module, "shortened", lambda pieces: (pieces, tuple(range(len(pieces.units)))))
    assert found == facts.find_facts(pieces)
    assert work == facts.record_work(pieces, 6)
