"""A language model from a folder, cut in two, trained, and back into a folder that transformers loads.

    python scripts/finetune_demo.py [FOLDER] [STEPS]        (`make finetune-demo`)

The text and the tokenizer are made of files that come with Python, so that nothing is fetched. Two workers hold the
lower half of a small GPT-2, whose embedding and head share a weight, and one the upper half.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

os.environ.setdefault("HF_HUB_OFFLINE", "1")
WORDS, LENGTH, BATCH = 2000, 64, 24
PLACEMENT = "0:0-1.0:2"
MODULES = ("argparse", "collections", "datetime", "decimal", "difflib", "email", "fractions", "functools", "http",
           "inspect", "itertools", "json", "logging", "math", "os", "pathlib", "random", "re", "shutil", "socket",
           "statistics", "string", "subprocess", "threading", "typing", "unittest", "urllib")  # fmt: skip
"""Modules whose documentation strings are read."""


def main(folder: Path, steps: int) -> None:
    """Makes a text, a tokenizer and a model, trains it, exports it, and lets it write a sentence."""
    text, model, run, out = folder / "text.jsonl", folder / "model", folder / "run", folder / "finetuned"
    folder.mkdir(parents=True, exist_ok=True)
    documents = [*texts()]
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents), encoding="utf-8")
    print(f"text: {len(documents):,} documents, {sum(map(len, documents)):,} characters of Python's own, in {text}")
    make_tokenizer(documents, model)
    print(f"model: {make_model(model):,} parameters, the head tied to the embedding, in {model}")
    stagewright(
        "train", f"hf:{model}", "--data", f"text:{text}", "--sequence-length", LENGTH, "--validation", 0.05,
        "--placement", PLACEMENT, "--batch", BATCH, "--microbatches", 2, "--device", "cpu", "--steps", steps,
        "--optimizer", "adamw", "--learning-rate", 2e-3, "--warm-up-steps", steps // 10, "--decay", "cosine",
        "--log-every", max(1, steps // 10), "--out", run, "--overwrite",
    )  # fmt: skip
    rmtree(out, ignore_errors=True)
    stagewright("export", run, "-o", out)
    show(run, out)


def texts() -> Iterator[str]:
    """Documents of Python's own: the topics of its help, its licence, and documentation strings."""
    from pydoc_data.topics import topics

    yield from topics.values()
    licence = Path(inspect.getfile(json)).parents[1] / "LICENSE.txt"
    if licence.is_file():
        yield licence.read_text(encoding="utf-8")
    for name in MODULES:
        module = import_module(name)
        for thing in (module, *vars(module).values()):
            told = inspect.getdoc(thing) if str(getattr(thing, "__module__", name)).startswith(name) else None
            if told and len(told) > 80:
                yield told


def make_tokenizer(documents: list[str], folder: Path) -> None:
    """A tokenizer that has learned its words from the text."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(documents, vocab_size=WORDS, special_tokens=["<end>"], show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": LENGTH}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def make_model(folder: Path) -> int:
    """A small GPT-2 with weights drawn at random, as transformers saves it; its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def stagewright(*words: object) -> None:
    """Runs a verb as a person would."""
    print("\n$ stagewright", *words, flush=True)
    subprocess.run([sys.executable, "-m", "stagewright", *map(str, words)], check=True)


def show(run: Path, out: Path) -> None:
    """The falling loss, and what the model in the exported folder writes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stagewright.record import Record

    points = [point for point in Record.load(run / "record.json").points if point.name == "loss"]
    told = points[:: max(1, len(points) // 8)] + points[-1:]
    print("\nloss:", " → ".join(f"{point.value:.2f}" for point in told), f"(steps 1 to {points[-1].step})")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    torch.manual_seed(0)
    begun = tokenizer("The function returns", return_tensors="pt")
    made = model.generate(**begun, max_new_tokens=30, do_sample=True, temperature=0.7, pad_token_id=0)
    print("it writes:", json.dumps(tokenizer.decode(made[0], skip_special_tokens=True)))
    print(f"load it with AutoModelForCausalLM.from_pretrained({str(out)!r})")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(Path(given[0] if given else mkdtemp(prefix="finetune-")), int(given[1]) if len(given) > 1 else 300)
