"""Predicted memory against what a run really took: on a card by torch's allocator, on CPU workers as they reside.

    python benchmarks/memory.py card --out FOLDER       runs drawn at random, several at once on one card
    python benchmarks/memory.py card --limits           the same, each worker with a limit at or below its prediction
    python benchmarks/memory.py cpu                     SGD, AdamW and adapters, on workers of this machine

Every run is a process of its own, `one CASE.json`, which predicts and trains three steps; workers leave what they saw.
A limit is torch.cuda.set_per_process_memory_fraction: at the prediction or above (said to fit) or well below (refused).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from tempfile import mkdtemp
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False, "attention_bias": False,
    "rope_theta": 10000.0,
}  # fmt: skip
COLUMNS = (
    "case", "model", "size", "placement", "worker", "stage", "batch", "microbatches", "optimizer", "precision",
    "recompute", "shard", "staleness", "policy", "limit", "ok", "seconds", "predicted", "allocated", "reserved",
    "error", "weights", "versions", "gradients", "optimizer_states", "activations", "buffers", "workspace", "framework",
    "allocator", "told",
)  # fmt: skip


# One run


def build(case: dict[str, Any]) -> Any:
    """The model of a case as layers."""
    from stagewright.models import build_model

    size, lora = case["size"], None
    if case.get("lora"):
        from stagewright.models.lora import Lora

        lora = Lora(rank=case["lora"], targets=("all-linear",))
    if case["model"] == "llama":
        folder = Path(case["folder"]) / "model"
        folder.mkdir(exist_ok=True)
        config = {**LLAMA, **{key: value for key, value in size.items() if key != "length"}}
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return build_model(
            f"hf:{folder}", from_scratch=True, sequence_length=size["length"], check=False, load=False, adapt=lora
        )
    return build_model(case["model"], adapt=lora, **size)


def plan_of(case: dict[str, Any], layered: Any) -> Any:
    """The plan of a case: cuts where operations stand as devices do."""
    from dataclasses import replace

    from stagewright.cluster import parse_placement
    from stagewright.models import forward_flops, parameter_counts
    from stagewright.planning import LayerTable, PlanOptions, fixed_plan

    counts = tuple(4 * number for number in parameter_counts(layered))
    table = LayerTable(model=case["model"], names=layered.names, flops=forward_flops(layered), parameter_bytes=counts)
    replicas = len(parse_placement(case["placement"])[0])
    options = PlanOptions(
        batch=case["rows"] * replicas * case["microbatches"], placement=case["placement"],
        num_microbatches=case["microbatches"], staleness=case["staleness"], policy=case["policy"],
        recompute=case["recompute"],
    )  # fmt: skip
    made = fixed_plan(table, options)
    return replace(made, stages=tuple(replace(each, shard_optimizer=case["shard"]) for each in made.stages))


def predict(case: dict[str, Any], layered: Any, plan: Any, settings: Any) -> list[dict[str, int]]:
    """By worker the bytes of each kind."""
    from stagewright.runtime.safety.preflight import device_of, needed_bytes
    from stagewright.training.recipes import OPTIMIZERS

    kind = OPTIMIZERS[case["optimizer"]]
    found = needed_bytes(
        plan, layered, settings, states=kind.states_of, scratch=kind.scratch_on(settings.device),
        device=device_of(settings),
    )  # fmt: skip
    return [each._asdict() for each in found]


def one(path: Path) -> None:
    """Predicts and trains one case; as one of its workers, leaves what it took."""
    import torch

    import stagewright as sw
    from stagewright.runtime.launch import mps
    from stagewright.runtime.settings import Settings
    from stagewright.training.config import Job
    from stagewright.training.recipes import Recipe

    mps.CONTROL = "no-such-command"  # workers take turns on the card: several such servers side by side may not
    case = json.loads(path.read_text(encoding="utf-8"))
    folder, rank = path.parent, int(os.environ.get("RANK", "-1"))
    case["folder"] = str(folder)
    settings = Settings(
        device=case["device"], precision=case["precision"], threads=1, timeout_s=120.0, start_timeout_s=200.0,
        loss_scale=1024.0,
    )  # fmt: skip
    layered = build(case)
    plan = plan_of(case, layered)
    number = len(plan.devices)
    if rank < 0:
        told = predict(case, layered, plan, settings)
        (folder / "predicted.json").write_text(
            json.dumps({"kinds": told, "stages": plan.stages_of, "batch": plan.batch}), encoding="utf-8"
        )
    if case["device"] == "cuda" and case["limit"] and (rank >= 0 or number == 1):
        kinds = json.loads((folder / "predicted.json").read_text(encoding="utf-8"))["kinds"]
        sizes = [sum(each.values()) - each["framework"] for each in kinds]
        me = max(rank, 0)
        if case["limit"] >= 1 or sizes[me] == max(sizes):
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, sizes[me] * case["limit"] / total), 0)
    try:
        sw.train(
            sw.make_schedule(plan, agree=settings.agrees),
            layered,
            recipe=Recipe(optimizer=case["optimizer"], learning_rate=1e-4),
            job=Job(steps=case["steps"], warm_up=1, save_final=False),
            settings=settings,
            folder=folder / "run",
            share=number,
        )
    finally:
        if rank >= 0 or number == 1:
            seen = {"rss": _resident("VmHWM"), "now": _resident("VmRSS")}
            if case["device"] == "cuda":
                seen |= {
                    "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
                    "ooms": torch.cuda.memory_stats().get("num_ooms", 0),
                }  # fmt: skip
            (folder / f"seen-{max(rank, 0)}.json").write_text(json.dumps(seen), encoding="utf-8")


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


# Many of them


def drawn(count: int, seed: int, *, limits: bool, shards: bool) -> list[dict[str, Any]]:
    """Cases at random; models and numbers of slices come round, so that all are there."""
    draw, found = random.Random(seed), []
    places = ["0:0", "0:0-1", "0:0.0:1", "0:0-2.0:3", "0:0", "0:0.0:1.0:2", "0:0-1.0:2-3", "0:0-3", "0:0-6.0:7", "0:0"]
    for number in range(count):
        model = ("alexnet", "resnet50", "gpt-tiny", "llama")[number % 4]
        precision = draw.choice(("fp32", "bf16", "bf16", "fp16"))
        if model in ("alexnet", "resnet50"):
            size: dict[str, Any] = {}
            rows = draw.choice((64, 128, 256) if model == "alexnet" else (8, 16, 32))
        else:
            length, width = draw.choice((256, 512, 1024)), draw.choice((512, 768, 1024))
            blocks, rows = draw.choice((4, 6, 8, 12)), draw.choice((1024, 2048, 4096)) // length
            if model == "gpt-tiny":
                size = {
                    "num_blocks": blocks, "width": width, "num_heads": width // 64, "vocabulary": 32000,
                    "context": length,
                }  # fmt: skip
            else:
                size = {
                    "hidden_size": width, "intermediate_size": width * 3, "num_hidden_layers": blocks,
                    "num_attention_heads": width // 64, "num_key_value_heads": width // 128, "length": length,
                }  # fmt: skip
        placement = draw.choice(places)
        piped, many = "." in placement, "-" in placement
        found.append({
            "model": model, "size": size, "rows": rows, "placement": placement, "precision": precision,
            "microbatches": draw.choice((1, 1, 2, 4)), "steps": 3, "device": "cuda",
            "staleness": draw.choice(("0", "0", "ssp", "2bw")) if piped else "0",
            "policy": draw.choice(("1f1b", "1f1b", "gpipe")), "recompute": draw.random() < 0.3,
            "optimizer": draw.choice(("sgd", "adamw", "adamw", "adam", "rmsprop", "adafactor", "muon")),
            "shard": shards and many and draw.random() < 0.5,
            "limit": draw.uniform(*((0.6, 0.85) if number % 4 == number // 4 % 4 else (1.0, 1.2))) if limits else 0,
        })  # fmt: skip
    return found


def run_all(cases: list[dict[str, Any]], out: Path, *, deadline_s: float, workers_at_once: int) -> list[dict[str, Any]]:
    """Runs cases side by side, as many as have cores, and returns a row for each worker of each."""
    from stagewright.cluster import parse_placement

    limit_s = 170 if cases[0]["device"] == "cuda" else 400
    begin, waiting, running, rows = time.monotonic(), list(enumerate(cases)), [], []
    base = Path(mkdtemp(prefix="memory-"))
    with (out / "memory.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        while waiting or running:
            used = sum(each[3] for each in running)
            late = time.monotonic() - begin > deadline_s
            while waiting and not late:
                number, case = waiting[0]
                size = len({id for stage in parse_placement(case["placement"]) for id in stage})
                if running and used + size > workers_at_once:
                    break
                waiting.pop(0)
                folder = base / str(number)
                folder.mkdir()
                (folder / "case.json").write_text(json.dumps(case), encoding="utf-8")
                with (folder / "log.txt").open("wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, str(Path(__file__).absolute()), "one", str(folder / "case.json")],
                        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    )  # fmt: skip
                running.append((number, case, process, size, folder, time.monotonic()))
                used += size
            if late:
                waiting.clear()
            for each in list(running):
                number, case, process, _, folder, started = each
                lasted = time.monotonic() - started
                if process.poll() is None and (lasted > limit_s or time.monotonic() - begin > deadline_s + 25):
                    os.killpg(process.pid, 9)
                    process.wait()
                if process.poll() is not None:
                    running.remove(each)
                    made = rows_of(number, case, folder, process.returncode, lasted)
                    writer.writerows(made)
                    file.flush()
                    rows += made
            time.sleep(0.2)
    return rows


def rows_of(number: int, case: dict[str, Any], folder: Path, status: int, seconds: float) -> list[dict[str, Any]]:
    """What a case came to, worker by worker."""
    plain = {key: case[key] for key in COLUMNS if key in case}
    plain |= {"case": number, "ok": int(status == 0), "seconds": round(seconds, 1), "size": json.dumps(case["size"])}
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    if status:
        short = "out of memory" in log or "OutOfMemory" in log or "ran out of memory" in log
        plain["told"] = "out of memory" if short else " | ".join(log.strip().splitlines()[-4:])[-600:]
    try:
        told = json.loads((folder / "predicted.json").read_text(encoding="utf-8"))
    except OSError:
        return [{**plain, "worker": -1}]
    found = []
    for worker, kinds in enumerate(told["kinds"]):
        seen_file = folder / f"seen-{worker}.json"
        seen = json.loads(seen_file.read_text(encoding="utf-8")) if seen_file.exists() else {}
        on_card = case["device"] == "cuda"
        predicted = sum(kinds.values()) - (kinds["framework"] if on_card else 0)
        allocated, reserved = (
            seen.get("allocated" if on_card else "now", 0),
            seen.get("reserved" if on_card else "rss", 0),
        )
        found.append({
            **plain, "worker": worker, "stage": told["stages"][worker], "batch": told["batch"], "predicted": predicted,
            "allocated": allocated, "reserved": reserved, "error": predicted / reserved - 1 if reserved else "",
            **{("optimizer_states" if kind == "optimizer" else kind): size for kind, size in kinds.items()},
        })  # fmt: skip
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """The fullest worker of each run, and the errors."""
    best: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["worker"] >= 0 and row["predicted"] >= best.get(row["case"], {"predicted": -1})["predicted"]:
            best[row["case"]] = row
    heads = "case model      place        opt       prec rc sh stale mb  rows   lim  ok predicted allocated  reserved"
    print(f"{heads}   error")
    for row in sorted(best.values(), key=lambda row: row["case"]):
        error = f"{row['error']:+7.1%}" if row["error"] != "" else "      –"
        print(
            f"{row['case']:4} {row['model']:10} {row['placement']:12} {row['optimizer']:9} {row['precision']:4} "
            f"{int(row['recompute'])}  {int(row['shard'])}  {row['staleness']:5} {row['microbatches']:2} "
            f"{row['batch']:5} {row['limit']:5.2f}  {row['ok']} {row['predicted'] / GIB:9.2f} "
            f"{row['allocated'] / GIB:9.2f} {row['reserved'] / GIB:9.2f} {error} {row.get('told', '')[:60]}"
        )
    lost = [row for row in rows if row["worker"] < 0]
    for row in lost:
        print(f"{row['case']:4} {row['model']:10} {row['placement']:12} {row['told'][:300]}")
    errors = [abs(row["error"]) for row in best.values() if row["ok"] and row["error"] != ""]
    if errors:
        within = sum(each <= 0.2 for each in errors)
        print(f"{len(errors)} runs: mean |error| {mean(errors):.1%}, worst {max(errors):.1%}, {within} within 20 %")
    fit = [row for row in best.values() if row["limit"] >= 1]
    refused = [row for row in best.values() if 0 < row["limit"] < 1]
    if fit or refused:
        out = sum(row.get("told") == "out of memory" for row in refused)
        print(f"said to fit: {len(fit)}, of which {sum(not row['ok'] for row in fit)} did not run")
        print(f"refused: {len(refused)}, of which {out} ran out")


def cpu_cases() -> list[dict[str, Any]]:
    """SGD, AdamW and adapters, with several replicas and without."""
    llama = {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "length": 256,
    }  # fmt: skip
    plain = {
        "precision": "fp32", "microbatches": 1, "steps": 3, "device": "cpu", "staleness": "0", "policy": "1f1b",
        "recompute": False, "limit": 0, "shard": False, "rows": 4,
    }  # fmt: skip
    wide = {"num_blocks": 4, "width": 512, "num_heads": 8, "vocabulary": 16000, "context": 256}
    return [
        {**plain, "model": "gpt-tiny", "size": wide, "placement": "0:0-1", "optimizer": "sgd"},
        {**plain, "model": "gpt-tiny", "size": wide, "placement": "0:0-1", "optimizer": "adamw"},
        {**plain, "model": "gpt-tiny", "size": wide, "placement": "0:0-1", "optimizer": "adamw", "shard": True},
        {**plain, "model": "gpt-tiny", "size": wide, "placement": "0:0.0:1", "optimizer": "adamw", "microbatches": 4},
        {**plain, "model": "alexnet", "size": {}, "placement": "0:0-1.0:2", "optimizer": "sgd", "rows": 16},
        {**plain, "model": "llama", "size": llama, "placement": "0:0.0:1", "optimizer": "adamw", "lora": 8},
        {**plain, "model": "llama", "size": llama, "placement": "0:0", "optimizer": "adamw", "recompute": True},
    ]  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        one(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("card", "cpu"))
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--shards", action="store_true")
    parser.add_argument("--seconds", type=float, default=370.0)
    parser.add_argument("--at-once", type=int, default=18)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--out", type=Path, default=Path("."))
    given = parser.parse_args()
    cases = (
        cpu_cases() if given.what == "cpu" else drawn(given.runs, given.seed, limits=given.limits, shards=given.shards)
    )
    cases = [case for number, case in enumerate(cases) if not given.only or number in given.only]
    given.out.mkdir(parents=True, exist_ok=True)
    show(run_all(cases, given.out, deadline_s=given.seconds, workers_at_once=given.at_once))


if __name__ == "__main__":
    main()
