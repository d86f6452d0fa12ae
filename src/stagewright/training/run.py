"""`sw.Run`: a model, data and a loss, planned, simulated, trained, evaluated and saved, without building stages."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from stagewright.cluster import Cluster
from stagewright.errors import DataError, ModelError, UsageError
from stagewright.models import Layered, build_model, make_layered
from stagewright.models.loss import Loss, as_sum, how_it_adds_up
from stagewright.models.tracing import first_line, tensors_in, undisturbed
from stagewright.plan import Plan
from stagewright.profile import Profile
from stagewright.profiling.detect import cpu_cluster, detect_cluster
from stagewright.profiling.measured import make_profile
from stagewright.record import Record
from stagewright.runtime.checkpoint.storage import write_tensors
from stagewright.runtime.launch.environment import RUN_FOLDER, is_main, is_worker
from stagewright.runtime.launch.script import SCRIPT_SO_FAR
from stagewright.runtime.weights import OptimizerMaker, optimizer_by
from stagewright.scheduling import make_schedule
from stagewright.simulation import make_plan, simulate
from stagewright.training.callbacks import Callback
from stagewright.training.command import job_of, local_cluster, plan_of, plan_options, recipe_of, settings_of
from stagewright.training.config import NO_OPTION, SECTIONS, Config, Job, make_config
from stagewright.training.dataset import Collate, DatasetFeed, Items, divided, items_of
from stagewright.training.events import NO_FIGURES
from stagewright.training.metrics import Metric
from stagewright.training.own_loop import Loop, opened
from stagewright.training.recipes import Recipe
from stagewright.training.sections import section_keys
from stagewright.training.start import train

_MakeScheduler = Callable[[Optimizer], LRScheduler]
_LOOKED_AT = 8
"""Rows of the data on which a model, a loss and metrics are tried before anything starts."""
_numbers = count()
"""Of the runs that a script makes."""


class Run:
    """A model and all that it is trained with; nothing starts until `fit`, `evaluate` or `simulate`.

        run = sw.Run(model, data=dataset, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, batch=64,
                     placement="0:0-2.0:3", epochs=3)
        run.fit()

    `optimizer` makes one of parameters, or is the name of one that recipes know; `scheduler` makes one of an optimizer,
    and steps after each update. `data` is a torch Dataset or a DataLoader, whose collate_fn and sampler hold then.
    `plan` is a Plan, a file, or "auto": the fastest one on this machine. `metrics` are functions of (outputs, targets).
    Every option of `stagewright train` is one here too, under its name in a configuration file: cut="fc1",
    microbatches=4, staleness="ssp", precision="bf16", checkpoint_every=100, resume="auto" …
    """

    def __init__(
        self, model: nn.Module | Layered | str, *, data: Any, loss: Loss | None = None,
        optimizer: OptimizerMaker | Recipe | str | None = None, scheduler: _MakeScheduler | None = None,
        evaluation_data: Any = None, collate_fn: Collate | None = None, metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (), plan: Plan | Path | str | None = None, folder: str | Path | None = None,
        console: Console | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._number = next(_numbers)
        items = items_of(data, collate_fn)
        self.config = _config_of(model, items, optimizer, plan, folder, options)
        self._settings = settings_of(self.config)
        self._layered, self._divide = _layered_of(model, items, loss, self.config)
        self._collate, self._metrics = items.collate, None if metrics is None else dict(metrics)
        self._items = self._divided(items)
        self._kept_out = None if evaluation_data is None else self._to_evaluate(evaluation_data)
        self._given_plan, self._console, self._callbacks = plan, console, tuple(callbacks)
        self._own_recipe = _own_recipe(optimizer, scheduler)
        self.record: Record | None = None
        """What the last `fit` came to."""
        if not is_worker():
            self._try_everything()

    @property
    def model(self) -> nn.Module:
        """The model, with the trained weights after `fit`."""
        return self._layered.model

    # ── plan and prediction ─────────────────────────────────────────────────────────────────────────────

    def plan(self) -> Plan:
        """Which layers are on which devices, and in which pieces batches go through them."""
        return self._plan

    @cached_property
    def _plan(self) -> Plan:
        given = self._given_plan if isinstance(self._given_plan, Plan) else None
        if self._given_plan == "auto":
            if is_worker() and RUN_FOLDER not in os.environ:
                raise UsageError(
                    'plan="auto" measures, and workers under torchrun would find several plans',
                    'run the script once without torchrun and `run.plan().save("plan.yaml")`; give plan="plan.yaml"',
                )
            given = SCRIPT_SO_FAR.once(f"plan-{self._number}", Plan, self._search)
        return plan_of(self.config, self._layered, local_cluster(self.config, self._settings), given)

    def _search(self) -> Plan:
        return make_plan(self._profile, self._cluster, plan_options(self.config)).best.plan

    def simulate(self) -> Record:
        """What a step would take, and where its time goes, from layers measured on this machine."""
        epoch = self._job.epoch_images
        return simulate(make_schedule(self.plan()), self._profile, self._cluster, epoch_images=epoch)

    @cached_property
    def _cluster(self) -> Cluster:
        """This machine, as plans are made and simulated for it."""
        here = local_cluster(self.config, self._settings)
        return cpu_cluster(len(here.device_ids)) if self._settings.device == "cpu" else detect_cluster()

    @cached_property
    def _profile(self) -> Profile:
        """What each layer costs here, for as many rows as devices may get."""
        return SCRIPT_SO_FAR.once(f"profile-{self._number}", Profile, self._measure)

    def _measure(self) -> Profile:
        layered, workers = self._layered, len(self._cluster.device_ids)
        batch = plan_options(self.config).rows(workers)
        sizes = sorted({max(1, batch // workers // 4), max(2, batch // workers), max(2, batch)})
        if self._settings.device == "cuda":
            sample, targets = (tuple(t.cuda() for t in each) for each in (layered.sample, layered.sample_targets))
            model = copy.deepcopy(layered.model).cuda()
            layered = make_layered(model, sample, loss=layered.loss, targets=targets, check=False)
        name, precision = self.config.model.name, self._settings.precision
        return make_profile(layered, batch_sizes=sizes, name=name, precision=precision, repeats=5, workers=workers)

    # ── training and what comes of it ───────────────────────────────────────────────────────────────────

    def fit(self) -> Record:
        """Trains from the weights that the model has; afterwards it has the trained ones, in every process."""
        folder = self.config.where.out
        self.record = self._train(self._job, self._kept_out, folder=folder, callbacks=self._callbacks)
        return self.record

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Loss and metrics of the model as it is now over a dataset, by default the one given as evaluation_data."""
        items = self._kept_out if data is None else self._to_evaluate(data)
        if items is None:
            raise UsageError(
                "there is nothing to evaluate on", "give evaluation_data=dataset, or run.evaluate(dataset)"
            )
        job = replace(
            self._job, only_evaluates=True, save_final=False, evaluate_every=1, evaluation_rows=len(items),
            checkpoint_every=None, checkpoints=None, resume=None, replan=False, nnodes=None, sinks=(),
        )  # fmt: skip
        points = self._train(job, items).points
        return {point.name.removeprefix("validation_"): point.value for point in points}

    def save(self, folder: str | Path) -> Path:
        """Writes the weights as they are now, the plan, and the record of the training, into a folder."""
        path = Path(folder)
        if is_main():
            path.mkdir(parents=True, exist_ok=True)
            tensors = {name: each.detach().cpu().clone() for name, each in self.model.state_dict().items()}
            write_tensors(path / "model.safetensors", tensors)
            self.plan().save(path / "plan.yaml")
            if self.record is not None:
                self.record.save(path / "record.json")
        return path

    @cached_property
    def _job(self) -> Job:
        plan, items = self.plan(), self._items
        if len(items) < plan.batch:
            raise DataError(f"{items.about} are fewer than the batch of {plan.batch:,}", "use a smaller batch")
        return job_of(self.config, plan, items, self._kept_out)

    def _train(self, job: Job, kept_out: Items | None, **more: Any) -> Record:
        schedule = make_schedule(self.plan(), agree=self._settings.agrees)
        return train(schedule, self._layered, console=self._console, **self._setting(job, kept_out), **more)

    def workers(self) -> AbstractContextManager[Loop]:
        """A loop of one's own instead of `fit`: see `sw.workers`."""
        schedule = make_schedule(self.plan(), agree=self._settings.agrees)
        folder = self.config.where.out
        return opened(schedule, self._layered, folder=folder, **self._setting(self._job, self._kept_out))

    def _setting(self, job: Job, kept_out: Items | None) -> dict[str, Any]:
        """What a training is told; rows that the model does not take are refused."""
        plan, settings = self.plan(), self._settings
        feed, held_out = self._feed(self._items), None if kept_out is None else self._feed(kept_out, is_training=False)
        for each in (feed, held_out) if not is_worker() else ():
            if each is not None:
                each.check_rows()
        return {
            "data": feed, "evaluation": held_out, "job": job, "settings": settings, "metrics": self._metrics,
            "recipe": self._own_recipe or recipe_of(self.config, plan, job), "share": self.config.where.share,
        }  # fmt: skip

    def _feed(self, items: Items, *, is_training: bool = True) -> DatasetFeed:
        return DatasetFeed(items, self._layered, seed=self._settings.seed, is_training=is_training)

    def _divided(self, items: Items) -> Items:
        """The items as the layers take them."""
        collate, divide = items.collate, self._divide
        return replace(items, collate=lambda given: divide(collate(given)))

    def _to_evaluate(self, data: Any) -> Items:
        """The items of other data, each once, collated as those of the training where nothing else is said."""
        items = items_of(data, None if hasattr(data, "collate_fn") else self._collate)
        return self._divided(replace(items, shuffle=False, weights=None, epoch=len(items.dataset)))

    def _try_everything(self) -> None:
        """Makes the optimizer once, and calls the metrics on a few rows, so that what fails does so here."""
        if self._own_recipe is not None and not isinstance(self._own_recipe, Recipe):
            trained = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
            parts = [nn.Parameter(each.detach()) for _, each in trained]
            for (name, _), part in zip(trained, parts):
                part.stagewright_name = name  # type: ignore[attr-defined]
            optimizer_by(self._own_recipe, parts)
        if not self._metrics:
            return
        inputs, targets = self._feed(self._items).look(_LOOKED_AT)
        with undisturbed(self.model), torch.no_grad():
            outputs = self._layered.stage(0, self._layered.num_layers)(*inputs, *targets)[1:]
        for name, metric in self._metrics.items():
            _check_metric(name, metric, outputs, targets)


def workers(model: nn.Module | Layered | str, **options: Any) -> AbstractContextManager[Loop]:
    """A loop of one's own, in the workers and in the script that starts them; options are those of `sw.Run`.

    with sw.workers(model, data=dataset, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, batch=64,
                    placement="0:0-2.0:3") as w:
        for batch in range(100):
            loss = w.step(batch)
            if w.is_main:
                print(loss)
    """
    return Run(model, **options).workers()


def _check_metric(name: str, metric: Metric, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Refuses a metric that does not add up over rows."""
    if name in (*NO_FIGURES, "loss"):
        raise UsageError(f"a metric is called {name!r}, as another figure is", "call it something else")
    called, rows = f"the metric {name!r}", outputs[0].size(0)
    try:
        made = metric(*outputs, *targets)
    except Exception as fault:
        raise UsageError(
            f"{called} fails: {first_line(fault)}", "it is called as metric(*outputs, *targets)"
        ) from fault
    if isinstance(made, Tensor) and made.shape == (rows,):
        return
    if how_it_adds_up(lambda *given: torch.as_tensor(metric(*given)).double(), outputs, targets, called) != "mean":
        raise UsageError(
            f"{called} of some rows together is not the mean of theirs, and batches go through in pieces",
            "return a mean over rows, or a number for each row; work out others from outputs after the run",
        )


def _own_recipe(
    optimizer: OptimizerMaker | Recipe | str | None, scheduler: _MakeScheduler | None
) -> OptimizerMaker | Recipe | None:
    """What turns gradients into weights, where it is not a recipe by name."""
    if isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer is {type(optimizer).__name__} of the whole model's parameters, and each stage has its own",
            f"give what makes one: optimizer=lambda parameters: {type(optimizer).__name__}(parameters, lr=…)",
        )
    if isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"scheduler is {type(scheduler).__name__} of one optimizer, and each stage has its own",
            f"give what makes one: scheduler=lambda optimizer: {type(scheduler).__name__}(optimizer, …)",
        )
    if optimizer is None or isinstance(optimizer, str | Recipe):
        if scheduler is not None:
            raise UsageError(
                f"scheduler goes with a function that makes an optimizer, and optimizer is {optimizer!r}",
                "give optimizer=torch.optim.AdamW or the like, or decay='cosine' instead of scheduler",
            )
        return optimizer if isinstance(optimizer, Recipe) else None
    if not callable(optimizer):
        raise UsageError(f"optimizer is {optimizer!r}", "give torch.optim.AdamW, or lambda parameters: …")
    if scheduler is None:
        return optimizer
    make: Any = optimizer
    make_scheduler = scheduler

    def both(parameters: Any) -> Any:
        made = make(parameters)
        return made, make_scheduler(made)

    return both


def _config_of(
    model: nn.Module | Layered | str, items: Items, optimizer: object, plan: object, folder: object, options: Any
) -> Config:
    """The options as a configuration; each goes to the section that has it."""
    keys = {
        key.key: section
        for section, cls in SECTIONS.items()
        for key in section_keys(cls)
        if section not in ("model", "data", "rehearsal") and f"{section}.{key.key}" not in NO_OPTION
    }
    given = {word: value for word, value in options.items() if value is not None}
    if items.batch is not None and not given.keys() & {"batch", "batch_per_device"}:
        given["batch"] = items.batch
    if not given.keys() & {"epochs", "steps"}:
        given["epochs"] = 1
    given |= {"optimizer": optimizer} if isinstance(optimizer, str) else {}
    given |= {"plan": plan} if isinstance(plan, str | Path) and plan != "auto" else {}
    given |= {} if folder is None else {"out": folder}
    module = model.model if isinstance(model, Layered) else model
    layer = {"model": {"name": model if isinstance(model, str) else type(module).__name__.lower()}}
    for word, value in given.items():
        if word not in keys:
            close = get_close_matches(word, keys, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else "see `stagewright train --help`"
            raise UsageError(f"sw.Run has no option {word!r}", hint)
        layer.setdefault(keys[word], {})[word] = str(value) if isinstance(value, Path) else value
    return make_config(layer)


def _layered_of(
    model: nn.Module | Layered | str, items: Items, loss: Loss | None, config: Config
) -> tuple[Layered, Callable[[Any], Any]]:
    """The model's layers with its loss, and what turns collated items into what these take."""
    if isinstance(model, str):
        model = build_model(model, seed=config.settings.seed)
    if isinstance(model, Layered):
        if loss is not None or not model.has_loss:
            todo = "leave loss out" if model.has_loss else "give make_layered a loss and targets"
            raise UsageError("layers have a loss of their own, or none where they were made without", todo)
        return model, lambda made: made
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}", "give an nn.Module, sw.make_layered(…), or a name")
    if loss is None:
        raise UsageError("loss is missing", "give loss=nn.CrossEntropyLoss(), or a function of (*outputs, *targets)")
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    args, kwargs, targets = divided(model, items.rows(items.spread(_LOOKED_AT)))
    args, kwargs, targets = pytree.tree_map_only(Tensor, lambda each: each.to(device), (args, kwargs, targets))
    outputs = _outputs_of(model, args, kwargs)
    layered = make_layered(model, args, kwargs, loss=as_sum(loss, outputs, targets), targets=targets)
    target_names = [spec.name for spec in layered.targets]

    def divide(made: Any) -> Any:
        args, kwargs, targets = divided(model, made)
        return {**kwargs, **dict(zip(target_names, targets))} if kwargs else (*args, *targets)

    return layered, divide


def _outputs_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """What the model makes of the first rows."""
    try:
        with undisturbed(model), torch.no_grad():
            outputs = tensors_in(model.eval()(*args, **kwargs))
    except Exception as fault:
        shapes = ", ".join(
            f"{tuple(each.shape)} {each.dtype}" for each in (*args, *kwargs.values()) if hasattr(each, "dtype")
        )
        raise ModelError(
            f"{type(model).__name__} fails on rows of the data ({shapes}): {first_line(fault)}",
            "an item is (inputs …, target), or names its parts as the model does; a collate_fn can make it so",
        ) from fault
    if not outputs or not all(each.dim() for each in outputs):
        raise ModelError(
            f"{type(model).__name__} gives no number for each row", "return outputs, rows first; the loss is apart"
        )
    return outputs
