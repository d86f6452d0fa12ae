"""A tiny interpreter of schedules that shares nothing with the package but the text form of orders.

It carries rows about as symbols: what a stage makes of a row is the tuple of weight versions that the row has seen on
its way. In the end every update must have summed every row of its batch once, with the versions that the plan promises.

Sends are buffered (a message waits in the mailbox of its pair until it is asked for) or must `meet` their receipts,
all operations of a pair of workers running one after the other in the order of issue, as NCCL runs them.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field

PATTERN = re.compile(r"(SF|RF|SB|RB|[FBIWGAU])(\d+)?(?:\.(\d+))?(?:[<>/](\d+))?([+-]\d+)?")


class FaultError(Exception):
    """What went wrong."""


@dataclass
class Problem:
    """What a schedule is for, in plain numbers: `workers[stage]` lists the worker of each replica."""

    workers: list[list[int]]
    versions: list[int]
    batch: int
    num_microbatches: int
    rotate: bool
    orders: list[list[tuple]]
    agree: bool

    @classmethod
    def of(cls, schedule) -> Problem:
        plan = schedule.plan
        orders = [[parse(word) for word in line.partition("│")[2].split()] for line in schedule.text.splitlines()]
        workers = [list(stage) for stage in plan.workers]
        rotate = plan.route == "rotate"
        return cls(workers, list(plan.versions), plan.batch, plan.num_microbatches, rotate, orders, schedule.agree)


def parse(word: str) -> tuple[str, int, int, int, int]:
    """(kind, stage, microbatch, peer or bucket, batch offset)"""
    kind, stage, number, peer, offset = PATTERN.fullmatch(word).groups()
    return kind, int(stage or -1), int(number or -1), int(peer or -1), int(offset or 0)


def owners(problem: Problem) -> list[list[dict[int, int]]]:
    """[stage][microbatch]: the worker of each row of the batch, found by asking about every row."""
    found = []
    for workers in problem.workers:
        rows_of = []
        for number in range(problem.num_microbatches):
            start = problem.batch * number // problem.num_microbatches
            stop = problem.batch * (number + 1) // problem.num_microbatches
            size, count = stop - start, len(workers)
            table = {}
            for row in range(start, stop):
                if problem.rotate:
                    replica = number % count
                else:
                    replica = next(one for one in range(count) if row - start < size * (one + 1) // count)
                table[row] = workers[replica]
            rows_of.append(table)
        found.append(rows_of)
    return found


@dataclass
class Worker:
    """One worker's list and memory."""

    actions: list[tuple]
    at: int = 0
    values: dict = field(default_factory=dict)  # (kind, stage, batch, microbatch) -> {row: symbol}
    receipts: dict = field(default_factory=lambda: defaultdict(list))  # the same key -> slots to be filled
    newest: dict = field(default_factory=dict)  # stage -> number of updates
    kept: dict = field(default_factory=dict)  # stage -> the K newest versions
    sums: dict = field(default_factory=lambda: defaultdict(list))  # (stage, batch) -> contributions
    held: dict = field(default_factory=lambda: defaultdict(int))
    most_held: dict = field(default_factory=lambda: defaultdict(int))


class Interpreter:
    def __init__(self, problem: Problem, num_batches: int, meet: bool) -> None:
        self.problem, self.meet = problem, meet
        self.owners = owners(problem)
        self.workers = [Worker(list(self.unroll(order, num_batches))) for order in problem.orders]
        for stage, workers in enumerate(problem.workers):
            for one in workers:
                self.workers[one].newest[stage] = 0
                self.workers[one].kept[stage] = {0}
        self.mail = defaultdict(deque)  # (source, target) -> messages
        self.asked = defaultdict(deque)  # (source, target) -> slots
        self.lines = defaultdict(deque)  # (worker, other) -> operations issued by worker
        self.reduced = defaultdict(dict)  # (stage, batch, bucket) -> {worker: contributions}
        self.agreed = defaultdict(set)
        self.updates = {}  # (stage, batch, worker) -> contributions

    def unroll(self, order, num_batches):
        offsets = [action[4] for line in self.problem.orders for action in line]
        for turn in range(-max(offsets, default=0), num_batches - min(offsets, default=0)):
            for kind, stage, number, peer, offset in order:
                if 0 <= turn + offset < num_batches:
                    yield kind, stage, number, peer, turn + offset

    def run(self) -> None:
        """Lets the workers act in turn until nobody can."""
        moved = True
        while moved:
            moved = False
            for number, worker in enumerate(self.workers):
                while worker.at < len(worker.actions) and self.act(number, worker, *worker.actions[worker.at]):
                    worker.at += 1
                    moved = True
        stuck = {
            number: worker.actions[worker.at]
            for number, worker in enumerate(self.workers)
            if worker.at < len(worker.actions)
        }
        if stuck:
            raise FaultError(f"locked: {stuck}")
        if any(self.mail.values()) or any(self.asked.values()) or any(self.lines.values()):
            raise FaultError("a message was left over")

    def act(self, me, worker, kind, stage, number, peer, batch) -> bool:
        """Does one action; False if it has to wait."""
        if kind == "F":
            return self.forward(me, worker, stage, number, batch)
        if kind in "BI":
            return self.backward(me, worker, kind, stage, number, batch)
        if kind == "W":
            part = worker.values.pop(("half", stage, batch, number), None)
            if part is None:
                raise FaultError(f"W{stage}.{number} without I")
            worker.sums[stage, batch] += part
            worker.held[stage] -= 1
        elif kind in ("SF", "SB"):
            self.send(me, worker, kind, stage, number, peer, batch)
        elif kind in ("RF", "RB"):
            slot = [kind, stage, number, batch, None]
            worker.receipts[kind, stage, batch, number].append(slot)
            self.receive(me, peer, slot)
        elif kind == "G":
            if me in self.reduced[stage, batch]:
                raise FaultError(f"G{stage} twice")
            self.reduced[stage, batch][me] = list(worker.sums[stage, batch])
        elif kind == "A":
            self.agreed[batch].add(me)
            return len(self.agreed[batch]) == len(self.workers)
        elif kind == "U":
            return self.update(me, worker, stage, batch)
        return True

    def arrived(self, worker, kind, stage, batch, number) -> dict | None:
        """All rows in the slots of a kind, None while one is empty."""
        rows = {}
        for slot in worker.receipts[kind, stage, batch, number]:
            if slot[4] is None:
                return None
            for row, symbol in slot[4].items():
                if row in rows:
                    raise FaultError(f"row {row} came twice for {kind}{stage}.{number}")
                rows[row] = symbol
        return rows

    def mine(self, me, stage, number) -> list[int]:
        return [row for row, owner in self.owners[stage][number].items() if owner == me]

    def forward(self, me, worker, stage, number, batch) -> bool:
        inputs = {}
        if stage:
            inputs = self.arrived(worker, "RF", stage - 1, batch, number)
            if inputs is None:
                return False
            inputs = {**worker.values.get(("F", stage - 1, batch, number), {}), **inputs}
        version, output = max(0, batch - self.problem.versions[stage] + 1), {}
        if version not in worker.kept[stage]:
            raise FaultError(
                f"F{stage}.{number} of batch {batch} uses version {version}, which is gone or not made yet"
            )
        for row in self.mine(me, stage, number):
            if stage and row not in inputs:
                raise FaultError(f"F{stage}.{number} of batch {batch} lacks row {row}")
            output[row] = (*(inputs[row] if stage else ()), version)
        if ("F", stage, batch, number) in worker.values:
            raise FaultError(f"F{stage}.{number} twice")
        worker.values["F", stage, batch, number] = output
        worker.held[stage] += 1
        worker.most_held[stage] = max(worker.most_held[stage], worker.held[stage])
        return True

    def backward(self, me, worker, kind, stage, number, batch) -> bool:
        saved = worker.values.get(("F", stage, batch, number))
        if saved is None or ("B", stage, batch, number) in worker.values:
            raise FaultError(f"{kind}{stage}.{number} of batch {batch} without its forward, or twice")
        gradients = {}
        if stage + 1 < len(self.problem.workers):
            gradients = self.arrived(worker, "RB", stage + 1, batch, number)
            if gradients is None:
                return False
            gradients = {**worker.values.get(("B", stage + 1, batch, number), {}), **gradients}
        part, output = [], {}
        for row, value in saved.items():
            if stage + 1 < len(self.problem.workers) and row not in gradients:
                raise FaultError(f"{kind}{stage}.{number} of batch {batch} lacks the gradient of row {row}")
            if value[-1] not in worker.kept[stage]:
                raise FaultError(f"{kind}{stage}.{number} needs version {value[-1]}, which is gone")
            if self.problem.versions[stage] == 1 and value[-1] != worker.newest[stage]:
                raise FaultError(f"{kind}{stage}.{number} sees other weights than its forward")
            part.append((row, value, gradients.get(row, ())))
            output[row] = (*gradients.get(row, ()), value[-1])
        worker.values["B", stage, batch, number] = output
        if kind == "B":
            worker.sums[stage, batch] += part
            worker.held[stage] -= 1
        else:
            worker.values["half", stage, batch, number] = part
        return True

    def send(self, me, worker, kind, stage, number, peer, batch) -> None:
        values = worker.values.get((kind[1], stage, batch, number))
        if values is None:
            raise FaultError(f"{kind}{stage}.{number} before there is something to send")
        other = stage + 1 if kind == "SF" else stage - 1
        rows = {row: symbol for row, symbol in values.items() if self.owners[other][number][row] == peer}
        if not rows:
            raise FaultError(f"{kind}{stage}.{number}>{peer} sends nothing")
        message = ("R" + kind[1], stage, number, batch, rows)
        if self.meet:
            self.lines[me, peer].append(message)
            self.join(me, peer)
        else:
            self.mail[me, peer].append(message)
            self.deliver(me, peer)

    def receive(self, me, peer, slot) -> None:
        if self.meet:
            self.lines[me, peer].append(slot)
            self.join(me, peer)
        else:
            self.asked[peer, me].append(slot)
            self.deliver(peer, me)

    def deliver(self, source, target) -> None:
        """Buffered: the first message goes to the first slot of its direction."""
        while self.mail[source, target] and self.asked[source, target]:
            self.fill(self.asked[source, target].popleft(), self.mail[source, target].popleft())

    def join(self, one, other) -> None:
        """Rendezvous: the operations at the heads of both lines belong together or nothing moves."""
        mine, theirs = self.lines[one, other], self.lines[other, one]
        while mine and theirs:
            if isinstance(mine[0], list) == isinstance(theirs[0], list):
                raise FaultError(f"workers {one} and {other} both send or both receive: {mine[0]} {theirs[0]}")
            slot, message = (mine[0], theirs[0]) if isinstance(mine[0], list) else (theirs[0], mine[0])
            self.fill(slot, message)
            mine.popleft(), theirs.popleft()

    def fill(self, slot, message) -> None:
        if tuple(slot[:4]) != message[:4]:
            raise FaultError(f"asked for {slot[:4]}, got {message[:4]}")
        slot[4] = message[4]

    def update(self, me, worker, stage, batch) -> bool:
        if self.problem.agree and len(self.agreed[batch]) < len(self.workers):
            raise FaultError(f"U{stage} of batch {batch} before the agreement")
        members = self.problem.workers[stage]
        if len(members) == 1:
            total = list(worker.sums[stage, batch])
        else:
            reduced = self.reduced[stage, batch]
            if me not in reduced:
                raise FaultError(f"U{stage} of batch {batch} without its reduction")
            if len(reduced) < len(members):
                return False
            total = sorted(part for parts in reduced.values() for part in parts)
        if worker.newest[stage] != batch:
            raise FaultError(f"U{stage} of batch {batch} after {worker.newest[stage]} updates")
        worker.newest[stage] = batch + 1
        worker.kept[stage].add(batch + 1)
        worker.kept[stage] = set(sorted(worker.kept[stage])[-self.problem.versions[stage] :])
        self.updates[stage, batch, me] = sorted(total)
        return True


def expected_updates(problem: Problem, num_batches: int) -> dict:
    """What every update must have summed: all rows, each with the versions of the delay that was promised."""
    found = {}
    for batch in range(num_batches):
        seen = [max(0, batch - versions + 1) for versions in problem.versions]
        for stage, workers in enumerate(problem.workers):
            ahead, back = tuple(seen[: stage + 1]), tuple(reversed(seen[stage + 1 :]))
            total = [(row, ahead, back) for row in range(problem.batch)]
            found.update({(stage, batch, one): total for one in workers})
    return found


def carry_out(schedule, num_batches: int, meet: bool) -> dict[int, int]:
    """Runs a schedule and compares with what was promised; the most activations held by stage."""
    problem = Problem.of(schedule)
    interpreter = Interpreter(problem, num_batches, meet)
    interpreter.run()
    if interpreter.updates != expected_updates(problem, num_batches):
        raise FaultError("an update summed something else than it should")
    most = defaultdict(int)
    for worker in interpreter.workers:
        for stage, count in worker.most_held.items():
            most[stage] = max(most[stage], count)
    return dict(most)
