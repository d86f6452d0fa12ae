"""What people bring: it works, or it is refused with the line of the model's code and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stagewright.errors import ModelError
from stagewright.models import make_layered

ROWS = torch.randn(2, 4)


def summed(*outputs: Tensor) -> Tensor:
    return torch.stack([output.square().sum() for output in outputs]).sum()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class LayerDrop(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) if torch.rand([]) < 0.5 else x


class Picking(Two):
    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.b(self.a(x)[chosen])


class Assigning(Two):
    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        h = self.a(x).clone()
        h[chosen] = 0
        return self.b(h)


class Reading(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).to(self.b.weight.dtype))


class Averaging(Two):
    """A buffer that forward updates and reads, in place or by assignment."""

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        now = self.average * 0.9 + h.detach().mean(0) * 0.1
        if self.assigns:
            self.average = now
        else:
            self.average.copy_(now)
        return self.b(h - self.average)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.head = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True), nn.Linear(8, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(source, target))


@pytest.mark.parametrize(
    ("model", "sample", "said"),
    [
        (LayerDrop(), (ROWS,), r"at .*test_refusals\.py:\d+ \(return self\.b\(x\) if torch\.rand[\s\S]*torch\.where"),
        (Picking(), (ROWS, torch.tensor([True, False])),
         r"test_refusals\.py:\d+ \(return self\.b\(self\.a\(x\)\[chosen\]\)\) depends on values\nkeep one entry a row"),
        (nn.Sequential(nn.Embedding(9, 4, sparse=True)), (torch.ones(2, 3, dtype=torch.long),),
         r"'0' makes sparse gradients[\s\S]*sparse=False"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_says_where_and_what_to_do(model: nn.Module, sample: tuple[Tensor, ...], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_layered(model, sample, loss=summed)


@pytest.mark.parametrize("seed", range(4))
def test_a_branch_on_a_random_number_is_refused_whichever_way_it_goes(seed: int) -> None:
    torch.manual_seed(seed)
    with pytest.raises(ModelError, match="LayerDrop cannot be traced"):
        make_layered(LayerDrop(), (ROWS,), loss=summed)


def test_masks_that_assign_and_whole_transformers_are_cut() -> None:
    assert make_layered(Assigning(), (ROWS, torch.tensor([True, False])), loss=summed).names == ("a", "b", "loss")
    words = torch.randn(2, 5, 8)
    assert make_layered(Both(), (words, words), loss=summed).names == ("transformer", "head", "loss")


def test_reading_a_weights_dtype_is_no_use_of_it() -> None:
    layered = make_layered(Reading(), (ROWS,), loss=summed)
    assert (layered.cuts(), layered.tied) == ((1, 2), ())


@pytest.mark.filterwarnings("ignore:layer 'a' mixes the rows", "ignore:forward changes the buffer")
@pytest.mark.parametrize("assigns", [False, True])
def test_buffers_that_forward_updates_are_updated(assigns: bool) -> None:
    model = Averaging(assigns=assigns)
    layered = make_layered(model, (ROWS,), loss=summed)
    assert model.average.eq(0).all()
    whole = layered.stage(0, layered.num_layers)
    whole(ROWS)
    expected = model.a(ROWS).mean(0) * 0.1
    torch.testing.assert_close(whole.get_buffer("average"), expected)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [({"labels": "ids"}, r"labels are among the model's arguments[\s\S]*targets="), ({"use_cache": True}, "use_cache")],
)
def test_transformers_models_say_what_to_leave_out(kwargs: dict[str, Any], said: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1, tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model, ids = transformers.GPT2LMHeadModel(config), torch.randint(0, 50, (2, 4))
    assert "loss" in make_layered(model, (ids,), loss=summed).names
    with pytest.raises(ModelError, match=said):
        make_layered(model, (ids,), {key: ids if value == "ids" else value for key, value in kwargs.items()})
