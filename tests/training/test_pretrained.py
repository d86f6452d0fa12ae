"""A model from its folder, trained by the command, and back into a folder that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stagewright.cli import main
from stagewright.runtime.checkpoint.resuming import whole_model
from stagewright.runtime.checkpoint.storage import checkpoints_in
from tests.runtime.architectures import ARCHITECTURES, LENGTH

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert not ended.value.code


@pytest.mark.timeout(400)
def test_what_is_exported_is_what_was_trained(tmp_path: Path) -> None:
    """A tied model in two stages, and a mixture whose experts have other names in files."""
    for name in ("gpt2", "mixtral"):
        folder, run, out = (tmp_path / f"{name} {what}" for what in ("folder", "run", "out"))
        ARCHITECTURES[name].folder(folder)
        (folder / "tokenizer_config.json").write_text('{"model_max_length": 32}')
        command(
            "train", f"hf:{folder}", "--sequence-length", str(LENGTH), "--batch", "6", "--placement", "0:0.0:1",
            "--ratio", "1:1", "--steps", "2", "--device", "cpu", "--out", str(run),
        )  # fmt: skip
        command("export", str(run), "-o", str(out))
        assert json.loads((out / "config.json").read_text())["architectures"]
        assert (out / "tokenizer_config.json").exists()
        before, found = (
            transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval()
            for each in (folder, out)
        )
        expected = whole_model(checkpoints_in(run)[0])
        for path, tensor in found.state_dict().items():
            assert torch.equal(tensor, expected[path]), path
        (tokens, *_), _ = ARCHITECTURES[name].batch(0)
        with torch.no_grad():
            trained, untrained = found(tokens).logits, before(tokens).logits
            before.load_state_dict(expected)
            assert torch.equal(before(tokens).logits, trained)
        assert not torch.equal(trained, untrained)
