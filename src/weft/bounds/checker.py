"""Check a certificate of a lower bound against the program alone.

Contract: the checker trusts nothing in a certificate. It recomputes heads, tails, sets, sums and drags from the
operations, their edges and their durations; the certificate (fields: `certificate`) only says which sets to look at. So
the resulting value is a lower bound for every order that the execution model allows, whatever the certificate contains.
If the claim names a memory limit, the bound holds for every order whose peak is within it. Given choices, it holds for
every mixture of them. `check` returns that value.
It raises if the certificate claims more, or is malformed. This module shares no code with the modules that find bounds,
so a mistake there cannot hide here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

from weft.bounds.choices import Choices
from weft.errors import VerificationError, compose
from weft.simulation.program import MILLION, OpKind, Program

FORMAT = "weft-bound-5"
"""The format of certificates that this module understands."""
CLOCKS = ("wall", "work", "wire")
"""Clocks that a bound may use. A step takes at least its time by each of them."""


def check(checked: Program | Choices, certificate: dict[str, Any]) -> int:
    """The bound that a certificate proves, in nanoseconds."""
    program, choices = (checked.program, checked) if isinstance(checked, Choices) else (checked, None)
    if certificate.get("format") != FORMAT:
        what = f"the certificate has the format {certificate.get('format')!r}, expected {FORMAT!r}"
        raise VerificationError(compose("check bound", what, do="make the plan again with this version of Weft"))
    try:
        chains = certificate["chains"] if certificate["merging"] == "allowed" else None
        clock, overlap = str(certificate["clock"]), certificate["overlap"]
        if clock not in CLOCKS:
            raise ValueError(f"unknown clock {clock!r}")
        value = CheckedProblem(program, chains, clock, choices).value_of(certificate)
        if clock == "work" and overlap is not None:
            busy = CheckedProblem(program, chains, "busy").value_of(overlap)
            value += busy * program.slowdown_ppm // (MILLION + program.slowdown_ppm)
        elif clock == "wire":
            compute = sum(program.duration_ns[op] for op, kind in enumerate(program.kinds) if kind is OpKind.COMPUTE)
            value += compute * program.collective_slowdown_ppm // (MILLION + program.collective_slowdown_ppm)
        value = max(0, value - program.launch_gap_ns)
        if shorter_ns := int(certificate["claim"].get("shorter_ns", 0)):
            value = min(value, shorter_ns)
        claimed = int(certificate["bound_ns"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"this is not a certificate of this program ({type(error).__name__}: {error})"
        raise VerificationError(compose("check bound", what)) from error
    if value < claimed:
        raise VerificationError(compose("check bound", f"the certificate claims {claimed} ns and proves {value} ns"))
    return value


class CheckedProblem:
    """The nodes and edges of a program in one direction of time, with durations by one clock."""

    def __init__(
        self, program: Program, chains: list[list[int]] | None, clock: str, choices: Choices | None = None
    ) -> None:
        self.choices = choices
        self.program, self.is_merging, self.clock, num = program, chains is not None, clock, len(program.kinds)
        self.gap = self.by_work_clock(program.launch_gap_ns) if clock != "busy" else 0
        self.order, self.preds = list[int](), dict[int, list[int]]()
        kernels = Counter(program.kernel)
        self.part_of = {op: k for op, k in enumerate(program.kernel) if k != -1 and kernels[k] > 1}
        self.duration, self.resource, self.latency = dict[int, int](), dict[int, int](), dict[int, int]()
        for op, kind in enumerate(program.kinds):
            self.preds[op] = [*program.preds[op], *(launch + num for launch in program.waits_for[op])]
            self.order.append(op)
            if any(pred not in self.preds for pred in self.preds[op]):
                raise ValueError(f"operation {op} needs a later one")
            if kind is OpKind.COMPUTE and program.duration_ns[op] and clock != "busy":
                lasts = self.by_wire_clock(program.duration_ns[op])
                self.resource[op], self.duration[op] = 0, lasts + self.gap * (op not in self.part_of)
            elif kind is OpKind.LAUNCH:
                self.preds[op + num] = self.preds[op]
                self.order.append(op + num)
                self.resource[op + num] = 1 + program.queues[program.queue[op]].link
                saved = program.latency_ns[op] if self.is_merging else 0
                rest = program.duration_ns[op] - saved
                if program.queues[program.queue[op]].is_copies:  # no compute slows it, and the busy clock ignores it
                    saved, rest = 0, 0 if clock == "busy" else self.by_wire_clock(program.duration_ns[op])
                self.latency[op + num] = self.by_work_clock(saved)
                self.duration[op + num] = self.by_work_clock(saved) + self.by_work_clock(rest)
        if any(not 0 <= saved <= self.duration[node] for node, saved in self.latency.items()):
            raise ValueError("a latency is negative or longer than its collective")
        self.chained = self.verified(chains or [])
        for op in self.launches_with_gaps():
            self.resource[op], self.duration[op] = 0, self.gap
        self.resource = {node: resource for node, resource in self.resource.items() if self.duration[node]}

    def verified(self, chains: list[list[int]]) -> set[int]:
        """The members of the chains, after checking that each queue has at most one and each member needs the last."""
        queues = [self.queue(int(chain[0])) for chain in chains if chain]
        if len(set(queues)) < len(queues):
            raise ValueError("two chains of one queue")
        for chain in chains:
            place = {int(node): number for number, node in enumerate(chain, 1)}
            before: dict[int, int] = {}  # by node, how many members have ended when it ends
            for node in self.order:
                before[node] = max((before[pred] for pred in self.preds[node]), default=0)
                if node in place:
                    if before[node] != place[node] - 1 or self.queue(node) != self.queue(int(chain[0])):
                        raise ValueError(f"{node} does not depend on the member before it in its chain")
                    before[node] = place[node]
        return {int(node) for chain in chains for node in chain if self.latency[int(node)] >= 0}

    def launches_with_gaps(self) -> list[int]:
        """Launches followed by a gap in every order: not parts of kernels; with merging, only members of chains."""
        num, queue = len(self.program.kinds), self.program.queue
        parts = {queue[op] for op in self.part_of if self.program.kinds[op] is OpKind.LAUNCH}
        if self.is_merging:
            return [node - num for node in self.chained if queue[node - num] not in parts]
        return [node - num for node in self.latency if node - num not in self.part_of]

    def by_work_clock(self, time: int) -> int:
        """The least that the clock shows for a time; the work clock is slower while a link is busy."""
        return time * MILLION // (MILLION + self.program.slowdown_ppm) if self.clock == "work" else time

    def by_wire_clock(self, time: int) -> int:
        """The least that the clock shows for a time of compute; the wire clock is slower while compute runs."""
        return time * MILLION // (MILLION + self.program.collective_slowdown_ppm) if self.clock == "wire" else time

    def value_of(self, proof: dict[str, Any]) -> int:
        """The value of a claim, with the heads and tails that its sets prove."""
        if proof["claim"]["kind"] == "memory" and self.clock != "wall":
            raise ValueError("a memory claim needs the wall clock")
        return self.claim(
            proof["claim"], self.earliest_starts(proof["heads"]), self.reversed().earliest_starts(proof["tails"])
        )

    def reversed(self) -> CheckedProblem:
        proof = copy.copy(self)
        proof.order, proof.preds = self.order[::-1], {node: [] for node in self.order}
        for node, preds in self.preds.items():
            for pred in preds:
                proof.preds[pred].append(node)
        return proof

    def earliest_starts(self, sets: Iterable[tuple[int, int, int]]) -> dict[int, int]:
        """The head of each node, by its predecessors and by the named sets."""
        named = {int(node): (int(resource), int(threshold)) for node, resource, threshold in sets}
        heads: dict[int, int] = {}
        for node in self.order:
            heads[node] = max((heads[pred] + self.duration.get(pred, 0) for pred in self.preds[node]), default=0)
            if node in named:
                resource, threshold = named[node]
                chosen = [n for n in self.before(node, heads, threshold) if self.resource.get(n) == resource]
                if chosen:
                    heads[node] = max(heads[node], min(heads[n] for n in chosen) + self.busy(chosen))
        return heads

    def before(self, node: int, heads: dict[int, int], threshold: int = 0) -> set[int]:
        """Ancestors of a node whose heads reach the threshold; heads never fall along edges, so the rest is cut off."""
        found, stack = set[int](), [node]
        while stack:
            new = {pred for pred in self.preds[stack.pop()] if heads[pred] >= threshold} - found
            found |= new
            stack += new
        return found

    def busy(self, nodes: Iterable[int]) -> int:
        """How long tasks occupy their resource: work, kernel gaps, and for each queue one latency or its chain's."""
        nodes, once, each = list(nodes), dict[int, int](), dict[int, int]()
        for node in nodes:
            queue, latency = self.queue(node), self.latency.get(node, 0)
            each[queue] = each.get(queue, 0) + latency * (node in self.chained)
            once[queue] = max(once.get(queue, 0), latency)
        gaps = max(0, len({self.part_of[node] for node in nodes if node in self.part_of}) - 1)
        work = sum(self.duration[node] - self.latency.get(node, 0) for node in nodes)
        return work + sum(max(latency, each[queue]) for queue, latency in once.items()) + gaps * self.gap

    def queue(self, node: int) -> int:
        return self.program.queue[node - len(self.program.kinds)] if node in self.latency else -1

    def claim(self, claim: dict[str, Any], heads: dict[int, int], tails: dict[int, int]) -> int:
        if claim["kind"] == "memory":
            return self.memory(int(claim["limit_bytes"]), claim["count"]) + self.program.launch_gap_ns
        if claim["kind"] == "task":
            if (node := claim["node"]) is None:
                return 0
            return heads[node] + self.duration.get(node, 0) + tails[node]
        if claim["kind"] == "cut":
            return self.idle_cut(claim, heads, tails)
        if claim["kind"] == "drag":
            return (
                self.drag_cut(claim, heads, tails)
                if claim["is_last"]
                else self.reversed().drag_cut(claim, tails, heads)
            )
        on_it = [node for node, resource in self.resource.items() if resource == claim["resource"]]
        chosen = [node for node in on_it if heads[node] >= claim["head"] and tails[node] >= claim["tail"]]
        starts, ends, repeated = [heads[node] for node in chosen], [tails[node] for node in chosen], 0
        if claim["kind"] == "again":
            repeated, last = self.repeated_work(claim)
            starts.append(heads[int(claim["at"])])
            ends += [self.duration.get(op, 0) + tails[op] for op in last]
        return min(starts) + self.busy(chosen) + repeated + min(ends)

    def repeated_work(self, claim: dict[str, Any]) -> tuple[int, set[int]]:
        """The work that runs again after `at` has started, and the operations whose demands the flows serve.

        A flow into a storage is at most the price of its bytes; an operation passes on all but the time that it takes.
        """
        program, choices, at = self.program, self.choices, int(claim["at"])
        if choices is None or choices.program is not program:
            raise ValueError("the operations of this program run once")
        once = {op for op, again_ns in enumerate(choices.again_ns) if again_ns < 0}
        made = [(storage, (op, size)) for op, pairs in enumerate(program.allocates) for storage, size in pairs]
        times = Counter(storage for storage, _ in made)
        maker = {s: pair for s, pair in made if times[s] == 1 and s not in program.given}
        before, later = {at}, {at}
        for op in reversed(range(at + 1)):
            before |= {*program.preds[op], *program.waits_for[op]} if op in before else set()
        for op in range(at + 1, len(program.kinds)):
            later |= {op} if not later.isdisjoint((*program.preds[op], *program.waits_for[op])) else set()
        before, later = before - {at}, (later - {at}) & once
        own, read = (
            {*program.uses[at], *(s for s, _ in program.allocates[at])},
            {s for d in later for s in program.uses[d]},
        )
        held = {s for s, (op, _) in maker.items() if op in once & before and (s in program.kept or s in read)}
        held |= {s for s in own if s in maker}
        room = int(claim["limit_bytes"]) - sum(maker[s][1] for s in held)
        room -= sum(size for s, (_, size) in made if s in program.given)
        if choices.away is not None:
            room += min(choices.away[0], int(claim["shorter_ns"]) * choices.away[1] // 1000)
            if not claim["shorter_ns"]:
                raise ValueError("values may leave, and the claim does not say for how long")
        flows = [(int(op), int(s), int(amount)) for op, s, amount in claim["flows"]]
        price, into, passed, demand = int(claim["price"]), Counter[int](), Counter[int](), 0
        for op, storage, amount in flows:
            if amount < 0 or storage in held or storage not in program.uses[op]:
                raise ValueError(f"operation {op} does not need storage {storage}")
            into[storage] += amount
            if op in later:
                demand += amount
            else:
                passed[op] += amount
        through = Counter[int]()
        for storage, amount in into.items():
            op, size = maker[storage]
            if amount > price * size:
                raise ValueError(f"more flow than storage {storage} is worth")
            through[op] += amount
        for op, amount in through.items():
            absorbed = 0 if op not in before else self.again(op, int(claim["resource"])) << 20
            if op not in once & before and amount > absorbed + passed[op]:
                raise ValueError(f"operation {op} absorbs more than its time")
        if price < 0 or not set(passed) <= set(through):
            raise ValueError("a flow comes from nowhere")
        return max(0, (demand - price * room) >> 20), {op for op, _, _ in flows if op in later}

    def again(self, op: int, resource: int) -> int:
        """The least time of another run of an operation on a resource."""
        program, again_ns = self.program, self.choices.again_ns[op] if self.choices else 0
        if program.kinds[op] is OpKind.COMPUTE:
            return self.by_wire_clock(again_ns) if resource == 0 else 0
        if program.kinds[op] is not OpKind.LAUNCH or resource != 1 + program.queues[program.queue[op]].link:
            return 0
        saved = program.latency_ns[op] if self.is_merging else 0
        return self.by_work_clock(max(0, again_ns - saved))

    def idle_cut(self, claim: dict[str, Any], heads: dict[int, int], tails: dict[int, int]) -> int:
        """The least of the cases: compute between both ends; another collective after `last`, or before `first`."""
        inside = [node for node, resource in self.resource.items() if resource == 0]
        cases, ends = list[int](), dict[str, int]()
        for side, proof, start, after in (("last", self, heads, tails), ("first", self.reversed(), tails, heads)):
            if (node := claim[side]) is not None:
                drags, ancestors = proof.drags(node, after), proof.before(node, start)
                inside = [n for n in inside if n in ancestors or drags.get(n, -1) >= int(claim[f"{side}_drag"])]
                dragged = [drags[n] for n in inside if n not in ancestors]
                cases += [start[node] + self.duration[node] + min(dragged)] if dragged else []
                ends[side] = self.duration[node] + after[node]
        lead, trail = min(heads[node] for node in inside), min(tails[node] for node in inside)
        lead, trail = ends.get("first", lead), ends.get("last", trail)
        return min([lead + self.busy(inside) + trail, *cases])

    def drags(self, node: int, tails: dict[int, int]) -> dict[int, int]:
        """For each node, the longest other collective of this queue that depends on it, tail included."""
        drags: dict[int, int] = {}
        for other in reversed(self.order):
            if self.latency.get(other) is not None and self.queue(other) == self.queue(node) and other != node:
                drags[other] = max(drags.get(other, -1), self.duration[other] + tails[other])
            for pred in self.preds[other] if other in drags else ():
                drags[pred] = max(drags.get(pred, -1), drags[other])
        return drags

    def drag_cut(self, claim: dict[str, Any], heads: dict[int, int], tails: dict[int, int]) -> int:
        """Compute, then a collective, then the collectives that late compute drags: one link carries them in turn."""
        last, through, ratio, long = int(claim["node"]), claim["through"], int(claim["ratio"]), int(claim["latency"])
        begin = last if through is None else int(through)
        shares = [(int(node), int(dragged), int(share)) for node, dragged, share in claim["shares"]]
        chosen = [node for node, resource in self.resource.items() if resource == 0 and heads[node] >= claim["head"]]
        ancestors = self.before(begin, heads)
        late = {node: self.duration[node] for node in chosen if node not in ancestors}
        given = dict.fromkeys((dragged for _, dragged, _ in shares), 0)
        bits = {node: 1 << number for number, node in enumerate(given)}
        reached = self.reached(given, None if through is None else begin)
        for node, dragged, share in shares:
            late[node] -= share
            given[dragged] += share
            if share < 0 or late[node] < 0 or not reached.get(node, 0) & bits[dragged]:
                raise ValueError(f"the work of {node} cannot be divided in this way")
        if any(self.resource[node] != self.resource[last] for node in given) or last not in self.latency:
            raise ValueError("the collectives are not all of one link")
        if through is not None and (begin not in self.latency or begin not in self.before(last, heads)):
            raise ValueError(f"{last} does not need the collective {begin}")
        if ratio < 1000 or last in given:
            raise ValueError("late work is given to the collective itself, or at a ratio below 1")
        lead, trail = min(heads[node] for node in (begin, *chosen)), min(tails[node] for node in (last, *given))
        rooms = {node: self.duration[node] - self.latency[node] for node in given}
        slow = [node for node in given if self.latency[node] >= long]
        most = rooms | {node: rooms[node] * ratio // 1000 for node in slow}
        gained = sum(late.values()) + sum(max(0, given[node] - room) for node, room in most.items())
        ends = self.duration[last] + (self.duration[begin] if begin != last else 0)
        if ratio > 1000 and slow:
            least = min(self.latency[node] for node in slow)
            ends = self.shortest_end(ends, ratio, least, int(through is not None), [rooms[node] for node in slow])
        return lead + ends + trail + sum(self.duration[node] for node in chosen) - gained

    @staticmethod
    def shortest_end(first: int, ratio: int, latency: int, joined: int, rooms: list[int]) -> int:
        """The largest time, at most `first`, in which no number of buckets of dragged collectives can end.

        From the last bucket to the first: if `after` is what the later buckets carry, a bucket starts with at most
        `ratio * after` of late work undone, and from then on the link carries it, the later ones and their latencies.
        """

        total = sum(rooms)

        def buckets_fit(end: int) -> bool:
            after = 0
            for number in range(1, len(rooms) + 1):
                carried = min(total, end - number * latency + (after * ratio + 999) // 1000)
                if carried < after:
                    return False
                if 1000 * (first + (number - joined) * latency + carried) <= 1000 * end + carried * ratio:
                    return True
                after = carried
            return False

        too_short, possible = 0, first + 1
        while possible - too_short > 1:
            middle = (too_short + possible) // 2
            too_short, possible = (too_short, middle) if buckets_fit(middle) else (middle, possible)
        return too_short

    def reached(self, collectives: Iterable[int], through: int | None) -> dict[int, int]:
        """For each node, the given collectives that it is or that depend on it, as a bit mask.

        With `through`, only those that do so by way of another collective of its queue.
        """
        reached = self.spread({node: 1 << number for number, node in enumerate(collectives)})
        if through is None:
            return reached
        after = [node for node in reached if node in self.latency and self.queue(node) == self.queue(through)]
        return self.spread({node: reached[node] for node in after if node != through})

    def spread(self, masks: dict[int, int]) -> dict[int, int]:
        """The masks of each node and of all nodes that depend on it, together."""
        spread = dict(masks)
        for node in reversed(self.order):
            for pred in self.preds[node] if node in spread else ():
                spread[pred] = spread.get(pred, 0) | spread[node]
        return spread

    def memory(self, limit_bytes: int, count: int | None) -> int:
        """The time for storages that must live one after the other, since only some fit into the limit at once."""
        program, forwards, backwards = self.program, self.longest_paths(), self.reversed().longest_paths()
        sizes = [(op, storage, size) for op, made in enumerate(program.allocates) for storage, size in made]
        times = Counter(storage for _, storage, _ in sizes)
        room = limit_bytes - sum(size for _, storage, size in sizes if storage in program.given)
        users: dict[int, set[int]] = {}
        for op, storages in enumerate(program.uses):
            for storage in storages:
                users.setdefault(storage, set()).add(op)
        total, leads, trails = 0, list[int](), list[int]()
        for op, storage, size in sizes:
            is_counted = size > 0 if count is None else size * (int(count) + 1) > room
            if is_counted and storage not in program.given and times[storage] == 1:
                time, trail = self.lifetime(op, storage in program.kept, users.get(storage, set()), backwards)
                if time:
                    total += time * (size if count is None else 1)
                    leads.append(forwards[op])
                    trails.append(trail)
        at_once = room if count is None else int(count)
        if at_once < 1:
            raise ValueError("no storage fits into the limit")
        return min(leads, default=0) + min(trails, default=0) - (-total // at_once)

    def lifetime(self, maker: int, is_kept: bool, users: set[int], tails: dict[int, int]) -> tuple[int, int]:
        """How long a storage lives at least, and what must follow. With merging, only while it is received."""
        num, kinds = len(self.program.kinds), self.program.kinds
        if self.is_merging:
            received = maker + num
            return (self.duration_without_gap(received), tails[received]) if kinds[maker] is OpKind.LAUNCH else (0, 0)
        if is_kept:
            return self.duration_without_gap(maker) + tails[maker], 0
        done: dict[int, int] = {}
        for op in sorted({maker, *users}):  # operations are numbered in a legal order
            for node in (op, op + num) if kinds[op] is OpKind.LAUNCH else (op,):
                before = (done[pred] for pred in self.preds[node] if pred in done)
                done[node] = self.duration_without_gap(node) + max(before, default=0)
        most = max(done.values())
        return most, max(tails[node] for node in done if done[node] == most)

    def duration_without_gap(self, node: int) -> int:
        """How long a node takes, without a launch gap."""
        if node in self.latency:
            return self.program.duration_ns[node - len(self.program.kinds)]
        return self.program.duration_ns[node] if self.program.kinds[node] is OpKind.COMPUTE else 0

    def longest_paths(self) -> dict[int, int]:
        """The longest path before each node, without launch gaps."""
        found: dict[int, int] = {}
        for node in self.order:
            found[node] = max((found[pred] + self.duration_without_gap(pred) for pred in self.preds[node]), default=0)
        return found
