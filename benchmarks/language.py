"""A language model on one card, or on slices of it, against the plain loop, DDP, FSDP2, torch's ZeRO-1 and pipelining.

    python -m benchmarks.language card              0.9 billion parameters, one worker
    python -m benchmarks.language card --compile    both compiled
    python -m benchmarks.language slices 4          16 layers of 1,024 on four workers that share the card, where the
                                                    planner chooses too, and predicts what ours will take
    python -m benchmarks.language card --tiny       a small model on the CPU, to try the script

All train the same Llama with AdamW in bf16 over fp32 weights on the same tokens, and take turns in the same processes:
the figures are medians over turns. With --where, ours is also run under torch's profiler, which tells where time goes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.contender import move_all_at_once
from benchmarks.rehearsal import joined, title
from torch import Tensor, nn
from torch.nn import functional as F

from stagewright import make_layered
from stagewright.cluster import DeviceId
from stagewright.cost import num_buckets
from stagewright.models import Layered
from stagewright.models.loss import token_cross_entropy_sum
from stagewright.plan import Plan, Stage
from stagewright.planning.options import PlanOptions
from stagewright.planning.search import make_plan
from stagewright.policy import Policy
from stagewright.profile import Profile
from stagewright.profiling.measured import make_profile
from stagewright.record import Record
from stagewright.rehearsal.measuring import average
from stagewright.rehearsal.slices import slice_cluster
from stagewright.runtime.feed import FunctionFeed
from stagewright.runtime.launch.mps import shared_cards
from stagewright.runtime.settings import Settings
from stagewright.runtime.warm_up import warm_up
from stagewright.runtime.worker import Worker
from stagewright.runtime.world import World, gather_json, open_world
from stagewright.scheduling import make_schedule
from stagewright.simulation import simulate

Step = Callable[[int], Tensor]
"""Runs a number of optimizer steps; returns the last loss."""


LATENCY_S = 2e-4
"""Of a message between two slices: pinned memory, a thread, a socket, and the same again."""


@dataclass(frozen=True)
class Case:
    """A Llama, and how much of it is trained at once."""

    layers: int
    width: int
    heads: int
    inner: int
    sequence: int
    batch: int
    vocabulary: int = 32_000
    microbatches: int = 8
    device: str = "cuda"
    compile: bool = False

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch


CARD = Case(16, 2048, 16, 5632, 1024, 16)
SLICES = Case(16, 1024, 16, 2816, 512, 32)


def tiny(case: Case) -> Case:
    """The same in small, on the CPU."""
    return replace(case, layers=4, width=64, heads=4, inner=128, sequence=32, batch=16, vocabulary=256, device="cpu")


def make_model(case: Case) -> Any:
    """The model, drawn on its device, with the same weights everywhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.width, intermediate_size=case.inner,
        num_hidden_layers=case.layers, num_attention_heads=case.heads, max_position_embeddings=case.sequence,
    )  # fmt: skip
    with torch.device(case.device):
        return LlamaForCausalLM(config)


def make_tokens(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(case.vocabulary, (case.batch, case.sequence), generator=generator).to(case.device)


def next_tokens(tokens: Tensor) -> Tensor:
    """The labels: each token's next one; the last has none."""
    return torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), -100)], 1)


def adamw(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=case.device == "cuda")


def mixed(case: Case) -> torch.autocast:
    return torch.autocast(case.device, torch.bfloat16)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """What transformers computes."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def loop(case: Case, model: nn.Module, tokens: Tensor, given: torch.optim.Optimizer | None = None) -> Step:
    """The plain loop over a transformers model, wrapped or not."""
    optimizer, labels = given or adamw(case, model.parameters()), next_tokens(tokens)

    def step(number: int) -> Tensor:
        for _ in range(number):
            optimizer.zero_grad(set_to_none=True)
            with mixed(case):
                loss = mean_loss(model(input_ids=tokens, use_cache=False).logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return loss.detach().clone()

    return step


def plain(case: Case, tokens: Tensor) -> Step:
    model = make_model(case)
    return loop(case, torch.compile(model) if case.compile else model, tokens)  # type: ignore[arg-type]


def ddp(case: Case, tokens: Tensor, world: World, *, shards: bool = False) -> Step:
    """DDP, with torch's ZeroRedundancyOptimizer where states are sharded (ZeRO stage 1)."""
    share = case.batch // world.size
    own = tokens[world.worker * share : (world.worker + 1) * share]
    model = nn.parallel.DistributedDataParallel(
        make_model(case), process_group=world.everyone, gradient_as_bucket_view=True, init_sync=False
    )
    if not shards:
        return loop(case, model, own)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sharded = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=world.everyone, parameters_as_bucket_view=True,
        lr=1e-4, fused=case.device == "cuda",
    )  # fmt: skip
    return loop(case, model, own, sharded)


def fsdp2(case: Case, tokens: Tensor, world: World) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    share = case.batch // world.size
    own = tokens[world.worker * share : (world.worker + 1) * share]
    model = make_model(case)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return loop(case, model, own)


def plan_here(layered: Layered, case: Case, world: World) -> tuple[Plan, Callable[[Plan], float]]:
    """The planner's exact plan for the workers as they show themselves here, and what a plan is predicted to take."""
    sizes = {case.batch, case.batch // world.size, *(max(1, case.batch // (case.microbatches * k)) for k in (1, 2, 4))}
    wait_for_all(world)
    own = make_profile(layered, batch_sizes=sorted(sizes), precision="bf16", name="llama", repeats=3)
    told = gather_json([own.to_dict(), move_all_at_once(world, 4 << 20)], world.control, world.size)
    profile = average([Profile.from_dict(each) for each, _ in told]).with_states(lambda role: 2.0)
    one, each = (statistics.median(rates[key] for _, rates in told) for key in ("one", "each"))
    cluster = joined(replace(slice_cluster(world.size), name="slices"), one, each, latency_s=LATENCY_S)
    profile = replace(profile, device=cluster.hosts[0].devices[0].kind)

    def score(plan: Plan) -> Record:
        return simulate(make_schedule(plan), profile, cluster, detail=False)

    options = PlanOptions(batch=case.batch, staleness="0")
    found = make_plan(profile, cluster, options, score).best.plan.to_dict() if world.worker == 0 else None
    plan = Plan.from_dict(gather_json(found, world.control, world.size)[0])
    if world.worker == 0:
        ms = [f"{1e3 * (layer.forward_s[-1] + layer.backward_s[-1]):.2f}" for layer in profile.layers]
        print(f"links {one / 1e9:.2f}, {each / 1e9:.2f} GB/s; layers at {profile.batch_sizes[-1]}: {' '.join(ms)} ms")
        print(f"planned: {title(plan)} {plan.placement}", flush=True)
    return plan, lambda plan: score(plan).median_step_s


class Part(nn.Module):
    """Consecutive blocks of a Llama as torch's pipelining wants them: a tensor in, a tensor out."""

    def __init__(self, model: Any, first: int, stop: int) -> None:
        super().__init__()
        inner = model.model
        self.embed = inner.embed_tokens if first == 0 else None
        self.blocks = nn.ModuleList(inner.layers[first:stop])
        self.rotary = inner.rotary_emb
        self.norm, self.head = (inner.norm, model.lm_head) if stop == len(inner.layers) else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.embed(hidden) if self.embed is not None else hidden
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        turns = self.rotary(hidden, places)
        for block in self.blocks:
            hidden = block(hidden, position_embeddings=turns, position_ids=places)
        return self.head(self.norm(hidden)) if self.head is not None and self.norm is not None else hidden


def pipelining(case: Case, tokens: Tensor, world: World) -> Step:
    """torch's 1F1B, a stage a worker."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    edges = [case.layers * stage // world.size for stage in range(world.size + 1)]
    part = Part(make_model(case), *edges[world.worker : world.worker + 2])
    stage = PipelineStage(part, world.worker, world.size, world.device, group=world.everyone)
    schedule = Schedule1F1B(stage, case.microbatches, loss_fn=mean_loss)
    optimizer, labels = adamw(case, part.parameters()), next_tokens(tokens)

    def step(number: int) -> Tensor:
        losses: list[Tensor] = []
        for _ in range(number):
            optimizer.zero_grad(set_to_none=True)
            losses.clear()
            with mixed(case):
                if world.worker == 0:
                    schedule.step(tokens)
                elif world.worker == world.size - 1:
                    schedule.step(target=labels, losses=losses)
                else:
                    schedule.step()
            optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def layered_of(case: Case, tokens: Tensor) -> Layered:
    """The model as layers, for our workers."""
    few = tokens[:2]
    return make_layered(
        make_model(case), (few,), loss=token_cross_entropy_sum(), targets=(next_tokens(few),), check=False
    )


def in_stages(
    layered: Layered, case: Case, num_stages: int, *, workers: int = 0, many: int = 0, policy: Policy = "1f1b"
) -> Plan:
    """Stages of equally many blocks, as the peer has them; on fewer workers each has several."""
    names = layered.names
    firsts = [f"layers.{case.layers * stage // num_stages}" for stage in range(1, num_stages)]
    starts = [0, *(next(i for i, name in enumerate(names) if name.endswith(first)) for first in firsts), len(names)]
    stages = tuple(
        Stage(layers=names[start:stop], devices=(DeviceId(number % (workers or num_stages), 0),))
        for number, (start, stop) in enumerate(zip(starts, starts[1:]))
    )
    microbatches = many or (case.microbatches if num_stages > 1 else 1)
    return Plan(model="llama", stages=stages, batch=case.batch, num_microbatches=microbatches, policy=policy)


def replicated(layered: Layered, case: Case, replicas: int, *, shards: bool = False) -> Plan:
    """Data parallelism."""
    devices = tuple(DeviceId(number, 0) for number in range(replicas))
    buckets = num_buckets(4 * sum(each.numel() for each in layered.model.parameters()))
    stage = Stage(layers=layered.names, devices=devices, shard_optimizer=shards, num_buckets=buckets)
    return Plan(model="llama", stages=(stage,), batch=case.batch)


def ours(case: Case, plan: Plan, layered: Layered, tokens: Tensor, world: World) -> Step:
    """Our worker."""
    labels = next_tokens(tokens)
    feed = FunctionFeed(lambda _, a, b: ((tokens[a:b],), (labels[a:b],)))
    settings = Settings(device=case.device, precision="bf16", compile=case.compile)
    worker = Worker(
        make_schedule(plan), layered, world, settings, make_optimizer=partial(adamw, case), feed=feed,
    )  # fmt: skip
    warm_up(worker)
    done, last = [0], [torch.zeros(())]

    def told(batch: int) -> None:
        sums = worker.figures(batch)
        last[0] = sums[0] / sums[1]

    worker.on_update = told

    def step(number: int) -> Tensor:
        worker.run(number, done[0])
        done[0] += number
        return last[0]

    return step


def measure(step: Step, number: int, world: World) -> tuple[float, float]:
    """Seconds a step, and the loss."""
    wait_for_all(world)
    began = time.perf_counter()
    loss = step(number)
    wait_for_all(world)
    return (time.perf_counter() - began) / number, float(loss)


def wait_for_all(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.control is not None:
        dist.barrier(group=world.control)


def compare(
    contenders: dict[str, Callable[[], Step]], case: Case, world: World, rounds: int, steps: int,
    predicted: dict[str, float],
) -> None:  # fmt: skip
    """Turns, then a row a contender."""
    made: dict[str, Step] = {}
    peaks: dict[str, float] = {}
    for who, make in contenders.items():
        peaks[who] = prepared(who, make, made, case, world)
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in made}
    for number in range(rounds):
        for who in list(made)[:: 1 if number % 2 else -1]:
            times[who].append(measure(made[who], steps, world))
    if world.worker == world.size - 1:
        for who, turns in times.items():
            spent = statistics.median(seconds for seconds, _ in turns)
            spread = (max(turns)[0] - min(turns)[0]) / spent
            print(
                f"{who:24} {spent * 1e3:8.2f} ms {case.tokens / spent:10,.0f} tokens/s  spread {spread:5.1%}  "
                f"memory {peaks[who]:6.2f} GiB  loss {turns[-1][1]:.3f}"
                + (f"  predicted {predicted[who] / spent - 1:+.1%} of step" if who in predicted else ""), flush=True,
            )  # fmt: skip


def prepared(who: str, make: Callable[[], Step], made: dict[str, Step], case: Case, world: World) -> float:
    """Builds a contender and warms it up; its own peak memory in GiB on this worker."""
    on_card = world.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_card else 0
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    made[who] = make()
    built = time.perf_counter() - began
    measure(made[who], 3, world)
    if world.worker == 0:
        print(f"{who}: built in {built:.1f} s, first steps {time.perf_counter() - began - built:.1f} s", flush=True)
    return (torch.cuda.max_memory_allocated() - before) / 2**30 if on_card else 0.0


def show_where(who: str, step: Step, world: World) -> None:
    """The kernels that take the most time, and how long the card is idle."""
    from torch.profiler import ProfilerActivity, profile

    wait_for_all(world)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(3)
        torch.cuda.synchronize()
    wait_for_all(world)
    for worker in range(world.size):
        if worker == world.worker and worker in (0, world.size - 1):
            table = seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=50)
            kept = [line[:52] + line[-78:] for line in table.splitlines()]
            print(f"── {who}, worker {worker}", *kept, sep="\n", flush=True)
        wait_for_all(world)


def run(given: argparse.Namespace) -> None:
    """As one of the workers."""
    case = CARD if given.what == "card" else SLICES
    case = replace(tiny(case) if given.tiny else case, compile=given.compile)
    with open_world(Settings(device=case.device, timeout_s=300)) as world:
        tokens = make_tokens(case)
        layered = layered_of(case, tokens)
        alone = world.size == 1
        contenders: dict[str, Callable[[], Step]] = {}
        predicted: dict[str, float] = {}
        if alone:
            contenders["plain loop"] = partial(plain, case, tokens)
            contenders["ours"] = partial(ours, case, in_stages(layered, case, 1), layered, tokens, world)
        else:
            contenders["ddp"] = partial(ddp, case, tokens, world)
            contenders["zero-1"] = partial(ddp, case, tokens, world, shards=True)
            contenders["fsdp2"] = partial(fsdp2, case, tokens, world)
            contenders["torch 1f1b"] = partial(pipelining, case, tokens, world)
            size, in_turns = world.size, partial(in_stages, layered, case, workers=world.size)
            plans = {
                "ours 1f1b": in_turns(size),
                "ours 1f1b, 16": in_turns(size, many=2 * case.microbatches),
                "ours data parallel": replicated(layered, case, size),
                "ours sharded": replicated(layered, case, size, shards=True),
            }
            if not given.only or "ours planned" in given.only:
                plans["ours planned"], predict = plan_here(deepcopy(replace(layered)), case, world)
                predicted |= {who: predict(plan) for who, plan in plans.items()}
            for who, plan in plans.items():
                contenders[who] = partial(ours, case, plan, deepcopy(replace(layered)), tokens, world)
        contenders = {who: make for who, make in contenders.items() if not given.only or who in given.only.split("; ")}
        if given.where:
            for who, make in contenders.items():
                step = make()
                step(3)
                show_where(who, step, world)
                del step
            return
        compare(contenders, case, world, given.rounds, given.steps, predicted)


def main(arguments: list[str]) -> None:
    """Here on one device, or as workers on slices of the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["card", "slices"])
    parser.add_argument("slices", nargs="?", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--where", action="store_true")
    parser.add_argument("--only", default="", help="contenders, separated by semicolons and a space")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args(arguments)
    if given.what == "card" or "RANK" in os.environ:
        run(given)
        return
    with shared_cards(0 if given.tiny else given.slices, "nccl") as shared:
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29431",
            "WORLD_SIZE": str(given.slices),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "benchmarks.language", *arguments]
        started = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, **meeting, "RANK": str(rank), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "2"},
            )
            for rank in range(given.slices)
        ]
        try:
            sys.exit(max(process.wait(timeout=900) for process in started))
        finally:
            for process in started:
                process.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
