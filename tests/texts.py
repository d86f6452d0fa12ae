"""Texts and a tokenizer small enough for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

END, PAD = "<end>", "<pad>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path, *, template: str | None = TEMPLATE, mask: bool = False) -> Path:
    """A tokenizer of single characters: a space is 3, a … z are 4 … 29; what is no word is 2, and a mask 32."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = [PAD, END, "<unknown>", " ", *map(chr, range(ord("a"), ord("z") + 1)), "<|user|>", "<|assistant|>"]
    made = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unknown>"))
    made.add_special_tokens([PAD, END, "<|user|>", "<|assistant|>", *(["<mask>"] if mask else [])])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), "isolated")
    made.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": "<unknown>",
        **({"mask_token": "<mask>"} if mask else {}),
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def ids(text: str) -> list[int]:
    """The tokens of a text of small letters and spaces."""
    return [3 if each == " " else ord(each) - ord("a") + 4 for each in text]


def write_lines(path: Path, lines: Iterable[Mapping[str, Any] | str]) -> Path:
    """A file of JSON lines; a string stands as it is."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
