"""Every row of tokens reaches the first stage and its labels the last one, once, under every plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stagewright.cli import main
from stagewright.data.packing import TokenRows, pack
from stagewright.data.text import find_tokenizer
from stagewright.data.tokens import make_tokens
from stagewright.models import Layered, build_model, make_layered
from stagewright.models.loss import token_cross_entropy_sum
from stagewright.plan import Plan
from stagewright.runtime.settings import Settings
from stagewright.training.feeds import TextFeed
from tests.texts import END, ids, make_tokenizer, write_lines
from tests.training.test_feed import PLANS

pytest.importorskip("transformers")
NUM_ROWS, BATCH, LENGTH = 50, 12, 10
Row = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty prompts and completions of different lengths."""
    folder = tmp_path_factory.mktemp("text")
    make_tokenizer(folder / "tokenizer")
    words = [f"{a}{b}" for a in "abcdefghij" for b in "klmno"]
    lines = [{"prompt": word, "completion": "z" * (number % 7 + 1)} for number, word in enumerate(words)]
    write_lines(folder / "rows.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> TokenRows:
    return pack(make_tokens(folder / "rows.jsonl", folder / "tokens", find_tokenizer(folder / "tokenizer")), LENGTH)


@pytest.fixture(scope="module")
def model() -> Layered:
    return build_model("gpt-tiny", context=LENGTH)


def batch_of(rows: TokenRows, model: Layered, plan: Plan, number: int, **options: object) -> list[Row]:
    """The tokens and labels of a batch as the workers of a plan are given them, in the order of its rows."""
    feed = TextFeed(rows, model, seed=3, **options)  # type: ignore[arg-type]
    feed.settle(plan, Settings())
    given: list[list[tuple[int, ...]]] = [[], []]
    for stage, which in ((0, "inputs"), (len(plan.stages) - 1, "targets")):
        for microbatch in range(plan.num_microbatches):
            for share in sorted(plan.shares(stage, microbatch), key=lambda share: share.start):
                (tensor,) = getattr(feed, which)(number, share.start, share.stop)
                given[stage > 0 or which == "targets"] += map(tuple, tensor.tolist())
    return list(zip(*given))


@pytest.mark.parametrize("name", PLANS)
def test_an_epoch_is_the_same_rows_under_every_plan(name: str, rows: TokenRows, model: Layered) -> None:
    epoch: list[Row] = []
    for number in range(NUM_ROWS // BATCH):
        found = batch_of(rows, model, PLANS[name], number)
        assert found == batch_of(rows, model, PLANS["one"], number)
        epoch += found
    assert len(set(epoch)) == len(epoch) == NUM_ROWS // BATCH * BATCH
    assert batch_of(rows, model, PLANS[name], NUM_ROWS // BATCH) != epoch[:BATCH]  # the next epoch has another order


def test_labels_are_those_of_the_completion_and_shifted_for_losses_that_do_not_shift(
    rows: TokenRows, model: Layered
) -> None:
    feed = TextFeed(rows, model, is_training=False)
    feed.settle(PLANS["one"], Settings())
    (tokens,), (labels,) = feed.inputs(0, 1, 2), feed.targets(0, 1, 2)
    assert tokens.tolist() == [[*ids("alzz"), 1, 0, 0, 0, 0, 0]]
    assert labels.tolist() == [[-100, *ids("zz"), 1, *[-100] * 6]]
    shifting = replace(model)
    object.__setattr__(shifting.loss, "shifts", True)
    try:
        feed = TextFeed(rows, shifting, is_training=False)
        feed.settle(PLANS["one"], Settings())
        assert feed.targets(0, 1, 2)[0].tolist() == [[-100, -100, *ids("zz"), 1, *[-100] * 5]]
    finally:
        object.__delattr__(shifting.loss, "shifts")


def test_an_evaluation_has_every_row_once_and_in_order(rows: TokenRows, model: Layered) -> None:
    sizes = [BATCH] * (NUM_ROWS // BATCH) + [NUM_ROWS % BATCH]
    feed = TextFeed(rows, model, is_training=False)
    feed.settle(PLANS["one"], Settings())
    found = [row for number, size in enumerate(sizes) for row in feed.inputs(number, 0, size)[0].tolist()]
    expected = [rows.read(number)[0].tolist() for number in range(NUM_ROWS)]
    assert [row[: len(whole)] for row, whole in zip(found, expected)] == expected


def test_rows_are_padded_to_a_few_lengths_that_every_worker_knows(rows: TokenRows, model: Layered) -> None:
    feed = TextFeed(rows, model, seed=3, lengths=2)
    feed.settle(PLANS["3-1 1f1b"], Settings())
    assert feed.lengths == (8, 10)
    assert {feed.length(batch) for batch in range(8)} == {8, 10}
    for batch in range(8):
        longest = max(sum(token != 0 for token in row) for row in feed.inputs(batch, 0, BATCH)[0].tolist())
        assert feed.inputs(batch, 2, 5)[0].shape == feed.targets(batch, 2, 5)[0].shape == (3, feed.length(batch))
        assert longest <= feed.length(batch) <= (8 if longest <= 8 else 10)
    seen = [row for batch in range(NUM_ROWS // BATCH) for row in feed.inputs(batch, 0, BATCH)[0][:, :4].tolist()]
    assert len({tuple(row) for row in seen}) == len(seen)


def test_columns_go_to_the_inputs_of_their_names(rows: TokenRows) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(32, 4), nn.Linear(4, 32)

        def forward(self, attention_mask: Tensor, input_ids: Tensor) -> Tensor:
            return self.head(self.words(input_ids) * attention_mask.unsqueeze(-1))

    sample = torch.zeros(2, LENGTH, dtype=torch.int64)
    made = make_layered(Masked(), (sample, sample), loss=token_cross_entropy_sum(), targets=(sample,))
    feed = TextFeed(rows, made, is_training=False)
    feed.settle(PLANS["one"], Settings())
    mask, tokens = feed.inputs(0, 0, 3)
    assert tokens.tolist()[0] == [*ids("akz"), 1, *[0] * 6]
    assert mask.tolist()[0] == [1] * 4 + [0] * 6


REFUSED = {
    "an option of text without text": (["--pack", "off"], "--pack is for text, and --data is synthetic"),
    "no tokenizer": (["--data", "text:{folder}/rows.jsonl"], "gpt-tiny has no tokenizer of its own\n       name one"),
    "a bad line": (
        ["--data", "text:{folder}/bad.jsonl", "--tokenizer", "{folder}/tokenizer"],
        "--data text:{folder}/bad.jsonl: {folder}/bad.jsonl, line 2 is no JSON",
    ),
    "empty text": (
        ["--data", "text:{folder}/empty.txt", "--tokenizer", "{folder}/tokenizer"], "empty.txt holds no text",
    ),
    "a long row": (
        ["--data", "tokens:{folder}/tokens", "--sequence-length", "8"],
        "rows.jsonl, line 6 has 9 tokens, and a row has 8",
    ),
    "a foreign tokenizer": (
        ["--data", "text:{folder}/unknown.txt", "--tokenizer", "{folder}/large"],
        "gives token 431, and gpt-tiny has 256",
    ),
    "images": (["--data", "tokens:{folder}/tokens", "--evaluation-data", "{folder}"], "is no text, and --data"),
    "two to evaluate on": (
        ["--data", "tokens:{folder}/tokens", "--evaluation-data", "tokens:{folder}/tokens", "--validation", "0.1"],
        "--validation and --evaluation-data both name rows",
    ),
    "compiled lengths": (["--data", "tokens:{folder}/tokens", "--lengths", "2", "--compile"], "code for one length"),
    "no tokens": (["--data", "tokens:{folder}"], "holds no tokens.json"),
    "too few rows": (
        ["--data", "tokens:{folder}/tokens", "--batch", "51", "--epochs", "1"],
        "has 50 rows, fewer than the batch of 51",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad(folder: Path, rows: TokenRows) -> Path:
    """The folder with texts that are refused."""
    write_lines(folder / "bad.jsonl", [{"text": "a"}, "{"])
    (folder / "empty.txt").write_text(" ")
    (folder / "unknown.txt").write_text("abc " * 20)
    large = make_tokenizer(folder / "large") / "tokenizer.json"
    large.write_text(large.read_text().replace('"c":6', '"c":431').replace('"c": 6', '"c": 431'))
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_any_worker_starts(
    case: str, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options, said = REFUSED[case]
    batch = [] if "--batch" in options else ["--batch", "12"]
    words = ["gpt-tiny", *batch, "--steps", "2", "--device", "cpu", "--placement", "0:0.0:1"]
    words += [] if "--sequence-length" in options else ["--sequence-length", str(LENGTH)]
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--out", str(tmp_path / "run"), *[each.format(folder=bad) for each in options]])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said.format(folder=bad) in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


def run(*words: object) -> None:
    """Runs a verb that ends well."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0


def test_skipped_lines_are_counted_and_told(
    bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = [{"text": "abc"}] * 20
    source = write_lines(tmp_path / "some.jsonl", [*lines, "{", *lines])
    run("data", "tokens", source, tmp_path / "tokens", "--tokenizer", bad / "tokenizer", "--on-corrupt", "skip")
    out = capsys.readouterr().out
    assert "160 tokens of 40 documents in" in out
    assert "1 lines skipped; the first:" in out
    tokens = ("--data", f"tokens:{tmp_path / 'tokens'}", "--sequence-length", 8, "--validation", 0.2)
    run(
        "train",
        "gpt-tiny",
        "--batch",
        4,
        "--steps",
        2,
        "--device",
        "cpu",
        "--devices",
        1,
        *tokens,
        "--out",
        tmp_path / "a",
    )
    out = capsys.readouterr().out
    assert "data: 1 record skipped; the first:" in out
    assert "validation:" in out


def test_the_end_of_a_document_is_a_token(folder: Path) -> None:
    assert END in (folder / "tokenizer" / "tokenizer_config.json").read_text()
    assert np.fromfile(folder / "tokens" / "tokens.bin", dtype=np.uint16)[3] == 1
