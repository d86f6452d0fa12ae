"""`--lora` from the command line: trained, exported, and loaded again by peft."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stagewright.models import build_model
from stagewright.models.lora import Lora
from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.checkpoint.storage import find_checkpoint

from .conftest import Run

pytest.importorskip("peft")
LORA = ("--lora", 4, "--lora-targets", "qkv,mlp.0", "--lora-alpha", 6)


def logits(model: nn.Module, context: int = 8) -> Tensor:
    tokens = torch.randint(100, (2, context), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        made: Tensor = model.eval()(tokens)
    return made


@pytest.mark.timeout(200)
def test_adapters_load_in_peft_and_merge(run: Run, tmp_path: Path) -> None:
    from peft import PeftModel

    words = ("--placement", "0:0.0:1", "--cut", "block2", "--batch", 8, "--device", "cpu", "--optimizer", "adamw")
    status, _, err = run("train", "gpt-tiny", *LORA, *words, "--steps", 3, "--out", tmp_path / "run")
    assert status == 0, err
    status, out, err = run("export", tmp_path / "run", "-o", tmp_path / "adapters")
    assert status == 0, err
    assert "numbers of adapters of" in out
    status, _, err = run("export", tmp_path / "run", "--merge-lora", "-o", tmp_path / "merged.safetensors")
    assert status == 0, err

    found = find_checkpoint(tmp_path / "run", print)
    assert found is not None
    ours = build_model("gpt-tiny", adapt=Lora(rank=4, targets=("qkv", "mlp.0"), alpha=6.0)).model
    untrained = logits(ours)
    ours.load_state_dict(whole_model(found[0]))
    plain = build_model("gpt-tiny").model
    assert torch.equal(untrained, logits(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(build_model("gpt-tiny").model, str(tmp_path / "adapters"))
    assert torch.equal(logits(theirs), logits(ours))
    assert not torch.allclose(logits(ours), untrained, atol=1e-4)
    plain.load_state_dict(load_file(tmp_path / "merged.safetensors"))
    assert torch.allclose(logits(plain), logits(ours), atol=1e-5)


def test_what_fits_nothing_is_refused_before_any_worker(run: Run, tmp_path: Path) -> None:
    words = ("train", "gpt-tiny", "--batch", 8, "--device", "cpu", "--steps", 1, "--out", tmp_path / "run")
    status, _, err = run(*words, "--lora", 4, "--lora-targets", "q_proj")
    assert status == 2
    assert "--lora-targets q_proj: no linear layer of the model is called that" in err
    assert "mlp.0, out, qkv" in err.replace("\n", " ") or "qkv" in err
    assert not (tmp_path / "run").exists()
    status, _, err = run(*words, "--lora-targets", "qkv")
    assert (status, "--lora-targets is given, but no --lora" in err) == (2, True)
    status, _, err = run(*words, "--lora", 4)
    assert (status, "name linear layers with --lora-targets" in err) == (2, True)
