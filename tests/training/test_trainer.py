"""Five steps over three workers give the losses of transformers.Trainer on the same tokens, unevenly counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.data.packing import TokenRows, pack, rows_of_batch
from stagewright.data.text import find_tokenizer
from stagewright.data.tokens import make_tokens
from stagewright.record import Record
from tests.texts import make_tokenizer, write_lines

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
LENGTH, BATCH, MICROBATCHES, STEPS, RATE = 16, 12, 3, 5, 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama whose head is tied to its embedding."""
    folder = make_tokenizer(tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, tie_word_embeddings=True, bos_token_id=1, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(model: Path) -> TokenRows:
    """Prompts and completions: from one row to the next more or fewer tokens count."""
    words = [f"{a}{b}" for a in "abcdefgh" for b in "klmnopqr"]
    lines = [{"prompt": word, "completion": word * (1 + number % 6)} for number, word in enumerate(words)]
    return pack(make_tokens(write_lines(model / "rows.jsonl", lines), model / "tokens", find_tokenizer(model)), LENGTH)


def trainer_losses(model: Path, rows: TokenRows, folder: Path) -> list[float]:
    """The loss of each of the Trainer's steps, each with several microbatches."""
    order = [row for batch in range(STEPS) for row in rows_of_batch(rows, batch, size=BATCH, seed=0).tolist()]
    losses: list[float] = []

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *given: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            losses.append(float(loss))
            return loss

    settings = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH // MICROBATCHES, gradient_accumulation_steps=MICROBATCHES,
        max_steps=STEPS, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=100, seed=0,
        optim="adamw_torch",
    )  # fmt: skip
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    InOrder(loaded, settings, train_dataset=[row_of(rows, number) for number in order]).train()
    return [sum(losses[step * MICROBATCHES : (step + 1) * MICROBATCHES]) for step in range(STEPS)]


def row_of(rows: TokenRows, number: int) -> dict[str, list[int]]:
    """A row as the Trainer takes it: padded, with labels of −100 for what does not count."""
    ids, counted = rows.read(number)
    padding = LENGTH - len(ids)
    labels = [token if counts else -100 for token, counts in zip(ids.tolist(), counted.tolist())]
    return {"input_ids": [*ids.tolist(), *[0] * padding], "labels": [*labels, *[-100] * padding]}


@pytest.mark.timeout(300)
def test_five_steps_have_the_losses_of_the_trainer(model: Path, rows: TokenRows, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        "train", f"hf:{model}", "--data", f"tokens:{model / 'tokens'}", "--sequence-length", LENGTH, "--batch", BATCH,
        "--microbatches", MICROBATCHES, "--placement", "0:0-1.0:2", "--steps", STEPS, "--optimizer", "adamw",
        "--learning-rate", RATE, "--device", "cpu", "--out", run, "--log-every", 1,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "stagewright", *map(str, words)], env=environment, check=True, timeout=250,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    found = [point.value for point in Record.load(run / "record.json").points if point.name == "loss"]
    expected = trainer_losses(model, rows, tmp_path / "trainer")
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=2e-6)
    assert found[-1] < found[0]
