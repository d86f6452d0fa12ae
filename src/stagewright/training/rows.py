"""What a configuration trains on: images, text or rows that are made up, and the model that takes them."""

from __future__ import annotations

from typing import TypeAlias

from stagewright.data.packing import TokenRows, pack
from stagewright.data.source import Dataset
from stagewright.data.tokens import Tokens, open_tokens, tokens_of_text
from stagewright.errors import DataError, ModelError, UsageError
from stagewright.models import Layered, build_model
from stagewright.models.zoo import made_by
from stagewright.runtime.feed import Feed
from stagewright.runtime.launch.environment import is_worker
from stagewright.training.config import PYTHON, SYNTHETIC, TEXT, TOKENS, Config
from stagewright.training.dataset import DatasetFeed, Items, items_of
from stagewright.training.export import lora_of
from stagewright.training.feeds import DataFeed, TextFeed

_Rows: TypeAlias = Dataset | TokenRows | Items
"""Images, rows of text, or items of a dataset of the user's own."""


def data_and_model(config: Config) -> tuple[_Rows | None, _Rows | None, Layered]:
    """What the run trains on, what it is evaluated on, and the model, which knows how long rows of text are."""
    _check_text_options(config)
    data = config.data
    if data.is_text:
        model = _model_of(config, None)
        return *_text_rows(config, model), model
    dataset = _images_in("--data", data.data, config)
    evaluation_set = _images_in("--evaluation-data", data.evaluation_data, config)
    return dataset, evaluation_set, _model_of(config, dataset)


def _images_in(option: str, folder: str | None, config: Config) -> Dataset | Items | None:
    """The images in the folder that an option names; None for made-up ones, which are made on the device.

    Of python:FILE.py:FUNCTION the items of the dataset that the function returns.
    """
    if folder in (None, SYNTHETIC):
        return None
    try:
        if str(folder).startswith(PYTHON):
            return items_of(made_by(str(folder), config.settings.seed), shuffle=option == "--data")
        from stagewright.data.opening import open_dataset  # needs the extra `data`

        return open_dataset(str(folder), on_corrupt=config.data.on_corrupt)
    except (DataError, ModelError, UsageError) as fault:
        raise DataError(f"{option} {folder}: {fault.what.removeprefix(f'{folder}: ')}", fault.todo) from None


def _model_of(config: Config, dataset: Dataset | Items | None) -> Layered:
    classes = config.model.num_classes or (dataset.num_classes if isinstance(dataset, Dataset) else None)
    return build_model(
        config.model.name, seed=config.settings.seed, num_classes=classes, image_size=config.model.image_size,
        label_smoothing=config.recipe.label_smoothing, sequence_length=config.model.sequence_length,
        from_scratch=config.model.from_scratch, check=not is_worker(), load=False,
        adapt=lora_of(config.model, config.settings.seed),
    )  # fmt: skip


def feed_for(dataset: _Rows | None, model: Layered, config: Config, *, is_training: bool = True) -> Feed | None:
    """The images or the text as the model takes them; None where they are made up."""
    seed = config.settings.seed
    if dataset is None:
        return None
    if isinstance(dataset, TokenRows):
        data = config.data
        return TextFeed(dataset, model, seed=seed, is_training=is_training, lengths=data.lengths, mask=data.mask)
    if isinstance(dataset, Items):
        feed = DatasetFeed(dataset, model, seed=seed, is_training=is_training)
        if not is_worker():
            feed.check_rows()
        return feed
    shape = model.inputs[0].shape_per_row
    if len(shape) != 3:
        raise UsageError(f"{config.model.name} takes rows of shape {shape}, not images", "use --data synthetic")
    return DataFeed(
        dataset, size=shape[-1], seed=seed, is_training=is_training, crop_area=config.recipe.crop_area,
        on_corrupt=config.data.on_corrupt,
    )  # fmt: skip


def _check_text_options(config: Config) -> None:
    """Refuses options of text where the data is none, and text beside data that is none."""
    data = config.data
    typed = {"--validation": data.validation, "--pack": data.pack, "--tokenizer": data.tokenizer}
    given = [option for option, value in typed.items() if value is not None]
    if not data.is_text:
        if given or data.lengths > 1:
            raise UsageError(
                f"{(given or ['--lengths'])[0]} is for text, and --data is {data.data}",
                "give --data text:FILE or tokens:FOLDER",
            )
        return
    if data.evaluation_data is not None and not data.evaluation_data.startswith((TEXT, TOKENS)):
        raise UsageError(
            f"--evaluation-data {data.evaluation_data} is no text, and --data {data.data} is", "give text:FILE"
        )
    if data.evaluation_data is not None and data.validation is not None:
        raise UsageError("--validation and --evaluation-data both name rows to evaluate on", "give one of them")
    if data.lengths > 1 and config.settings.compile:
        raise UsageError("--compile makes code for one length, and --lengths asks for several", "leave one of them out")


def _text_rows(config: Config, model: Layered) -> tuple[TokenRows, TokenRows | None]:
    """The rows to train on, and those to evaluate on where any are asked for."""
    data, name = config.data, config.model.name
    shape = model.inputs[0].shape_per_row if model.inputs else ()
    if len(shape) != 1 or model.inputs[0].dtype.is_floating_point:
        raise UsageError(f"{name} takes rows of shape {shape}, not tokens", "use a language model")
    made = []
    for option, given in (("--data", data.data), ("--evaluation-data", data.evaluation_data)):
        if given is not None:
            try:
                tokens = _tokens_of(given, config)
                _check_vocabulary(tokens, model, name)
                _check_lesson(tokens, model, config)
                made.append(pack(tokens, shape[0], data.pack, data.on_corrupt))
            except DataError as fault:
                raise DataError(f"{option} {given}: {fault.what}", fault.todo) from None
    if data.validation is not None:
        return made[0].split(data.validation)
    return made[0], made[1] if len(made) > 1 else None


def _tokens_of(given: str, config: Config) -> Tokens:
    if given.startswith(TOKENS):
        return open_tokens(given.removeprefix(TOKENS))
    tokenizer = config.data.tokenizer
    if tokenizer is None:
        if not config.model.name.startswith("hf:"):
            raise DataError(f"{config.model.name} has no tokenizer of its own", "name one: --tokenizer FOLDER")
        tokenizer = config.model.name.removeprefix("hf:")
    return tokens_of_text(given.removeprefix(TEXT), tokenizer, on_corrupt=config.data.on_corrupt)


def _check_vocabulary(tokens: Tokens, model: Layered, name: str) -> None:
    about, scores = tokens.about, model.predictions[0].shape_per_row if model.predictions else ()
    if len(scores) == 2 and about.largest >= scores[-1]:
        raise DataError(
            f"the tokenizer of {about.tokenizer} gives token {about.largest:,}, and {name} has {scores[-1]:,} words",
            "use the tokenizer that belongs to the model: --tokenizer FOLDER",
        )


def _check_lesson(tokens: Tokens, model: Layered, config: Config) -> None:
    """Refuses text that does not have what the model learns."""
    about, name = tokens.about, config.model.name
    if len(model.targets[0].shape_per_row) != 1:
        raise DataError(f"text has no labels of rows, which {name} learns", "give --data python:FILE.py:FUNCTION")
    if model.learns == "masked" and about.mask is None:
        raise DataError(
            f"{name} learns masked tokens, and the tokenizer of {about.tokenizer} has no mask token",
            "use the tokenizer that belongs to the model: --tokenizer FOLDER",
        )
    if model.learns != "answer":
        return
    if not len(tokens.ignored) or config.data.pack not in (None, "off"):
        packed = f"--pack {config.data.pack} mixes them" if len(tokens.ignored) else "these have none"
        raise DataError(
            f"{name} learns the answers to prompts, and {packed}", 'give lines of "prompt" and "completion", a row each'
        )
    if model.answer_start is None:
        raise DataError(
            f"config.json of {name} names no decoder_start_token_id", "set it to the token that answers begin with"
        )
