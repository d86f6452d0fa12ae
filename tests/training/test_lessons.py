"""What text teaches a model that hides words, and one that answers prompts, as transformers' own loss has it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stagewright.cli import main
from stagewright.data.packing import TokenRows, pack
from stagewright.data.text import find_tokenizer
from stagewright.data.tokens import make_tokens
from stagewright.runtime.settings import Settings
from stagewright.training.feeds import TextFeed
from tests.runtime.architectures import ARCHITECTURES
from tests.texts import END, ids, make_tokenizer, write_lines
from tests.training.test_feed import BATCH, PLANS
from tests.training.test_resume_text import losses_in

transformers = pytest.importorskip("transformers")
LENGTH, MASK, NOTHING = 16, 32, -100
PAIRS = [(f"{a}{b}" * (1 + (ord(a) + ord(b)) % 3), b * (1 + ord(a) % 4)) for a in "abcdefgh" for b in "klm"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenRows]:
    """Long joined text, and prompts with completions."""
    folder = tmp_path_factory.mktemp("lessons")
    tokenizer = find_tokenizer(make_tokenizer(folder / "tokenizer", mask=True))
    write_lines(folder / "words.jsonl", [{"text": f"the {n % 7 * 'x'} of it {END}"} for n in range(4000)])
    write_lines(folder / "pairs.jsonl", [{"prompt": a, "completion": b} for a, b in PAIRS])
    made = {name: make_tokens(folder / f"{name}.jsonl", folder / name, tokenizer) for name in ("words", "pairs")}
    return {name: pack(each, LENGTH) for name, each in made.items()}


def feed_of(rows: TokenRows, learns: str, plan: str = "one", **options: Any) -> TextFeed:
    names = ["input_ids", "attention_mask", *(["decoder_input_ids"] if learns == "answer" else [])]
    inputs = tuple(SimpleNamespace(name=name) for name in names)
    model: Any = SimpleNamespace(inputs=inputs, loss=None, learns=learns, answer_start=0)
    feed = TextFeed(rows, model, seed=3, **options)
    feed.settle(PLANS[plan], Settings())
    return feed


def test_of_the_words_15_in_100_are_to_be_found_and_most_of_them_are_hidden(rows: dict[str, TokenRows]) -> None:
    feed, special = feed_of(rows["words"], "masked"), torch.tensor([0, 1, 30, 31, MASK])
    whole = {tuple(rows["words"].read(number)[0].tolist()) for number in range(len(rows["words"]))}
    counts = torch.zeros(5)
    for batch in range(300):
        (shown, there), (labels,) = feed.inputs(batch, 0, BATCH), feed.targets(batch, 0, BATCH)
        chosen = labels != NOTHING
        assert set(map(tuple, torch.where(chosen, labels, shown).tolist())) <= whole
        assert not torch.isin(labels, special).any()
        assert there.all()
        words = ~torch.isin(torch.where(chosen, labels, shown), special)
        hidden, kept = chosen & (shown == MASK), chosen & (shown == labels)
        counts += torch.stack([words, chosen, hidden, chosen & ~hidden & ~kept, kept]).flatten(1).sum(1)
    words, chosen, hidden, other, kept = counts.tolist()
    assert chosen / words == pytest.approx(0.15, abs=0.005)
    assert hidden / chosen == pytest.approx(0.8, abs=0.02)
    assert other / chosen == pytest.approx(0.1 * 32 / 33, abs=0.015)
    assert kept / chosen == pytest.approx(0.1 + 0.1 / 33, abs=0.015)


@pytest.mark.parametrize("plan", ["dp", "3-1 1f1b", "5-2-1"])
def test_every_worker_hides_the_same_words_and_another_epoch_others(plan: str, rows: dict[str, TokenRows]) -> None:
    one, parts = feed_of(rows["words"], "masked"), feed_of(rows["words"], "masked", plan)
    for which in ("inputs", "targets"):
        whole = getattr(one, which)(2, 0, BATCH)[0]
        pieces = [getattr(parts, which)(2, start, start + 3)[0] for start in range(0, BATCH, 3)]
        assert torch.equal(torch.cat(pieces), whole)
    per_epoch, text = len(rows["words"]) // BATCH, {}
    for batch in (*range(per_epoch), *range(per_epoch, 2 * per_epoch)):
        (shown, _), (labels,) = one.inputs(batch, 0, BATCH), one.targets(batch, 0, BATCH)
        for row, place in enumerate(one._positions(batch).tolist()):
            text.setdefault(place, []).append((shown[row].tolist(), labels[row].tolist()))
    again = [len({str(each) for each in found}) for found in text.values() if len(found) == 2]
    assert sum(again) / len(again) > 1.8
    evaluated = feed_of(rows["words"], "masked", is_training=False, mask=0.5)
    assert torch.equal(
        evaluated.targets(0, 0, 4)[0], feed_of(rows["words"], "masked", is_training=False, mask=0.5).targets(0, 0, 4)[0]
    )
    assert 0.35 < (evaluated.targets(0, 0, 12)[0] != NOTHING).float().mean() < 0.6


def test_a_prompt_goes_to_the_encoder_and_its_answer_to_the_decoder(rows: dict[str, TokenRows]) -> None:
    feed = feed_of(rows["pairs"], "answer", is_training=False)
    (prompts, there, answers), (labels,) = feed.inputs(0, 0, BATCH), feed.targets(0, 0, BATCH)
    for row, (prompt, answer) in enumerate(PAIRS[:BATCH]):
        given, learned = [*ids(prompt), 1], [*ids(answer), 1]
        assert prompts[row].tolist() == [*given, *[0] * (LENGTH - len(given))]
        assert there[row].tolist() == [1] * len(given) + [0] * (LENGTH - len(given))
        assert labels[row].tolist() == [*learned, *[NOTHING] * (LENGTH - len(learned))]
        assert answers[row, : len(learned)].tolist() == [0, *learned[:-1]]


@pytest.mark.timeout(300)
def test_the_first_loss_of_a_run_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 in two stages, all rows in one batch: transformers makes the decoder's inputs and the mean itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, run = ARCHITECTURES["t5"].folder(tmp_path / "t5"), tmp_path / "run"
    make_tokenizer(folder)
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": a, "completion": b} for a, b in PAIRS])
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "train", f"hf:{folder}", "--data", f"text:{tmp_path}/pairs.jsonl", "--steps", "3",
                "--batch", str(len(PAIRS)),
                "--sequence-length", str(LENGTH), "--log-every", "1", "--placement", "0:0.0:1", "--ratio", "1:1",
                "--microbatches", "3", "--device", "cpu", "--out", str(run),
            ]
        )  # fmt: skip
    assert ended.value.code == 0
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).train()

    def padded(texts: list[str], filler: int) -> torch.Tensor:
        return torch.tensor([[*ids(text), 1, *[filler] * (LENGTH - 1 - len(text))] for text in texts])

    prompts = padded([prompt for prompt, _ in PAIRS], 0)
    expected = model(
        input_ids=prompts, attention_mask=(prompts != 0).long(), labels=padded([answer for _, answer in PAIRS], NOTHING)
    ).loss
    losses = losses_in(run)
    assert losses[1] == pytest.approx(expected.item(), rel=1e-5)
    assert losses[3] < losses[1]


REFUSED = {
    "masks without a mask token": ("bert", [], "words", "has no mask token\n       use the tokenizer that belongs"),
    "prompts in plain text": ("t5", [], "words", "learns the answers to prompts, and these have none"),
    "prompts that are packed": ("t5", ["--pack", "join"], "pairs", "--pack join mixes them"),
    "labels of rows": ("bert", ["--num-classes", "3", "--from-scratch"], "words", "text has no labels of rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_text_that_lacks_what_is_learned_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, options, text, said = REFUSED[case]
    folder = ARCHITECTURES[name].folder(tmp_path / name)
    make_tokenizer(folder)
    write_lines(tmp_path / "words.jsonl", [{"text": "words and words"}] * 20)
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": a, "completion": b} for a, b in PAIRS])
    words = ["train", f"hf:{folder}", "--data", f"text:{tmp_path}/{text}.jsonl", "--batch", "4", "--steps", "2"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--sequence-length", "16", "--device", "cpu", *options])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
