"""Figures of text: tokens, perplexity, learning rate, norm, and the share of a card's peak."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import stagewright as sw
from stagewright.models import build_model
from stagewright.models.lora import Lora
from stagewright.plan import Plan, Stage
from stagewright.record import Record
from stagewright.training.display import log_lines
from stagewright.training.metrics import peak_flops, perplexity, token_flops

BATCH, STEPS = 4, 4


def trained(name: str, folder: Path) -> tuple[Record, list[dict[str, object]]]:
    """The record of a short run on one device, and what it told of its steps."""
    model = build_model(name)
    plan = Plan(model=name, stages=(Stage(layers=model.names, devices=sw.parse_devices("0:0")),), batch=BATCH)
    job = sw.Job(
        name=name, steps=STEPS, log_every=2, save_final=False, evaluation_rows=BATCH, evaluate_every=1,
        steps_per_epoch=STEPS,
    )  # fmt: skip
    record = sw.train(
        sw.make_schedule(plan, agree=True), model, job=job, folder=folder,
        recipe=sw.Recipe(optimizer="adamw", learning_rate=0.01, decay="linear", total_steps=STEPS),
        settings=sw.Settings(clip_norm=1.0, threads=1, timeout_s=60),
    )  # fmt: skip
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return record, [each for each in events if "iter" in each]


def test_text_is_told_in_tokens(tmp_path: Path) -> None:
    record, (first, second, validation) = trained("gpt-tiny", tmp_path / "run")
    length = build_model("gpt-tiny").inputs[0].shape_per_row[0]
    assert (first["tokens"], second["tokens"]) == (2 * BATCH * length, 4 * BATCH * length)
    assert second["tokens_per_s"] == pytest.approx(second["images_per_s"] * length)  # type: ignore[operator]
    assert (first["learning_rate"], second["learning_rate"]) == (pytest.approx(0.0075), pytest.approx(0.0025))
    assert first["norm"] > 0  # type: ignore[operator]
    assert "mfu" not in first  # nobody knows a CPU's peak
    assert validation["perplexity"] == pytest.approx(math.exp(validation["loss"]))  # type: ignore[arg-type]
    assert record.sample_tokens == length
    assert record.summary()["tokens_per_s"] == pytest.approx(record.samples_per_s * length)
    names = {point.name for point in record.points}
    assert {"loss", "learning_rate", "norm", "validation_perplexity"} <= names
    [line] = log_lines(second)
    assert f"lr: 0.0025, norm: {second['norm']:.6g}, tokens: {4 * BATCH * length}, tokens/s: " in line
    assert "samples/s" not in line


def test_images_are_told_in_samples(tmp_path: Path) -> None:
    record, (first, *_, validation) = trained("tiny-cnn", tmp_path / "run")
    assert not {"tokens", "tokens_per_s", "perplexity"} & (first.keys() | validation.keys())
    assert record.sample_tokens is None
    [line] = log_lines(first)
    assert "samples/s: " in line
    assert "tokens" not in line


def test_operations_of_a_token_are_six_a_weight_and_four_a_frozen_one() -> None:
    model = build_model("gpt-tiny")
    length = model.row_tokens
    assert length is not None
    matrices = sum(
        each.numel() for name, each in model.model.named_parameters() if each.dim() == 2 and "embed" not in name
    )
    assert token_flops(model, length) == 6 * matrices
    adapted = build_model("gpt-tiny", adapt=Lora(rank=4, targets=("qkv",)))
    added = sum(each.numel() for each in adapted.model.parameters() if each.requires_grad)
    assert token_flops(adapted, length) == 4 * matrices + 6 * added
    assert build_model("tiny-cnn").row_tokens is None
    assert peak_flops(torch.device("cpu"), "fp32") is None


def test_perplexity_is_of_tokens_and_of_plain_labels_alone() -> None:
    assert perplexity(build_model("gpt-tiny"), 2.0) == pytest.approx(math.e**2)
    assert perplexity(build_model("gpt-tiny", label_smoothing=0.1), 2.0) is None
    assert perplexity(build_model("tiny-cnn"), 2.0) is None
