"""docs/finetuning.md: its commands work as they are printed, in their order, on a small model without cards."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.guides.running import ROOT, environment
from tests.guides.running import run as run_installed
from tests.texts import make_tokenizer, write_lines

transformers = pytest.importorskip("transformers")
GUIDE = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and the text that the guide begins with."""
    made = tmp_path_factory.mktemp("finetuning")
    make_tokenizer(made / "my-model")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=64, n_embd=16, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=1
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made / "my-model")
    write_lines(made / "my-text.jsonl", [{"text": "the cat sat on the mat " * (4 + n % 5)} for n in range(24)])
    return made


def run(folder: Path, *words: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(900)
def test_the_guide_from_a_folder_to_a_fine_tuned_folder(fresh: Path, folder: Path) -> None:
    assert [shlex.split(line)[1] for line in COMMANDS] == ["data", "train", "train", "export"]
    said = []
    for line in COMMANDS:
        program, *words = shlex.split(line)
        assert program == "stagewright"
        here = ["--device", "cpu"] if words[0] == "train" else []
        own = environment(fresh, {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")})
        said.append(run_installed([fresh / program, *words, *here], folder, own))
    assert "tokens of 24 documents" in said[0]
    assert "validation:" in said[1]
    assert re.search(r"going on after step \d+", said[2])
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder / "my-finetuned")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "my-model")
    text = transformers.AutoTokenizer.from_pretrained(folder / "my-finetuned")(
        "the cat sat on the mat", return_tensors="pt"
    )
    losses = [float(each(**text, labels=text["input_ids"]).loss.detach()) for each in (before, whole)]
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_trains_and_writes_a_sentence(tmp_path: Path) -> None:
    said = run(tmp_path, ROOT / "scripts" / "finetune_demo.py", tmp_path / "demo", 30)
    losses = [float(each) for each in re.findall(r"\d+\.\d+", re.search(r"^loss: (.*) \(", said, re.MULTILINE)[1])]
    assert losses[-1] < losses[0] - 1
    assert 'it writes: "The function returns' in said
