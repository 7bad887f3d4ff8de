"""Engine: decides which collectives are merged into which bucket.

Contract: one engine serves every kind of collective, policy and strategy. It takes members in launch order, so every
rank makes the same decisions. Members of a bucket need not be adjacent. A member that depends on another member with
the same key goes to a later bucket. A bucket accepts a member if their keys are equal and no dependency forbids it,
directly or through the buckets formed so far. Every collective gets exactly one decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch.fx import Node

from weft.bucketing.eligibility import (
    MOVES_DATA,
    Key,
    Member,
    Payload,
    Strategy,
    Touches,
    depends_on_offset,
    is_bucket,
    payloads_of,
    read_member,
    written_buffer,
)
from weft.bucketing.placement import Placement
from weft.bucketing.policy import Policy
from weft.bucketing.prologues import foldable
from weft.bucketing.units import units_of
from weft.graph.collective import Collective, collectives
from weft.graph.contraction import Contraction
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable
from weft.graph.ops import REDUCTIONS, Kind
from weft.graph.roles import Roles
from weft.graph.value_numbers import ValueNumbers
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Merge, bucket_names
from weft.quantities import size_text

Slot = tuple[Key, str | None]
"""Members of one slot may share buckets: they have the same key and, if the policy asks for it, the same module or
unit."""
UNLIMITED = 1 << 62
"""The cap in bytes of a bucket that holds one unit."""


@dataclass(eq=False)
class Bucket:
    """Members that become one launch. Each member starts as a bucket with itself alone."""

    slot: Slot
    members: list[Member]
    num_bytes: int
    cap: int = 0
    seen_bytes: int = 0
    """Total size of the earlier members of its slot when this bucket was opened."""
    closed: bool = False
    """Accepts no more members: the user pinned it, or an earlier pass made it."""
    shards: set[int] = field(default_factory=set[int])
    """Value numbers of the shards that its members gather; equal numbers mean equal values."""

    @property
    def first(self) -> Member:
        return self.members[0]


class Bucketing:
    """Plans the buckets of one graph."""

    def __init__(
        self, name: str, dag: Dag, groups: GroupTable, policy: Policy, strategy: Strategy, alias_outputs: bool
    ) -> None:
        self.name, self.dag, self.groups, self.policy = name, dag, groups, policy
        self.strategy: Strategy = strategy
        self.alias_outputs = alias_outputs
        self.contraction = Contraction(dag)
        self.touches = Touches(dag)
        self.numbers = ValueNumbers(dag)
        self.refusals: dict[str, Refusal] = {}
        self.decisions: list[tuple[int, Decision]] = []
        self.units: dict[Node, str] = {}

    def plan(self, kinds: Iterable[Kind]) -> tuple[list[Merge], list[Decision]]:
        """The merges to make, and a decision for every collective of these kinds."""
        members = self._members(frozenset(kinds))
        if self.policy.units != "none":
            self.units = units_of([member.collective.launch for member in members], self.policy.units)
        buckets = self._pin([Bucket(self._slot(m), [m], m.num_bytes, closed=is_bucket(m.collective)) for m in members])
        while self._sweep(buckets):
            buckets = sorted((b for b in buckets if b.members), key=lambda b: b.first.index)
        merged = [bucket for bucket in buckets if len(bucket.members) > 1 and bucket.num_bytes]
        places = Placement(self.dag, self.policy).of([[m.collective for m in b.members] for b in merged])
        merges = [self._merge(bucket, place) for bucket, place in zip(merged, places, strict=True)]
        for bucket in buckets:
            self._decide(bucket, buckets)
        return merges, [decision for _, decision in sorted(self.decisions, key=lambda pair: pair[0])]

    # Members.

    def _members(self, kinds: frozenset[Kind]) -> list[Member]:
        roles, policy = Roles(self.dag), self.policy
        found: list[Member] = []
        tensor_groups = roles.tensor_groups(self.groups) if policy.replicas else set[str]()
        for collective in collectives(self.dag.nodes[0].graph) if self.dag.nodes else ():
            if collective.kind not in kinds:
                continue
            launch = collective.launch.name
            member = read_member(collective, self.dag, self.strategy)
            role = roles.of(collective) if policy.role is not None else None
            if role != policy.role:
                told_by = roles.told_by(collective)
                direction = "goes to" if collective.kind in REDUCTIONS else "comes from"
                sentence = f"{launch} stays: it carries {role}, not {policy.role}"
                sentence += f", since it {direction} {told_by.name}" if told_by is not None else ""
                member = Refusal(Reason.OTHER_ROLE, sentence, told_by.name if told_by is not None else None)
            elif (group := self.groups.canonical(collective.group)) in tensor_groups:
                sentence = f"{launch} stays: group {group!r} carries mostly activations"
                member = Refusal(Reason.OTHER_ROLE, sentence)
            elif launch in policy.forbidden:
                member = Refusal(Reason.FORBIDDEN, f"{launch} stays: the option `forbidden` names it")
            elif group in policy.withheld:
                member = Refusal(Reason.OTHER_RANKS, f"{launch} stays: {policy.withheld[group]}")
            if isinstance(member, Member):
                found.append(member)
            else:
                self._note(self.dag.index[collective.launch], member, launch)
        return found

    def _slot(self, member: Member) -> Slot:
        launch = member.collective.launch
        return member.key, self.units.get(launch) or self.policy.module_of(launch)

    def _pin(self, buckets: list[Bucket]) -> list[Bucket]:
        """Form the buckets that the user pinned."""
        by_name = {bucket.first.name: bucket for bucket in buckets}
        for names in self.policy.pinned:
            chosen = [by_name[name] for name in names if name in by_name and not by_name[name].closed]
            for other in chosen[1:]:
                refusal = self._why_not(chosen[0], other.first, pinned=True)
                if refusal is not None:
                    self.refusals[other.first.name] = refusal
                    continue
                self._join(chosen[0], other)
            for bucket in chosen:
                bucket.closed = True
        return [bucket for bucket in buckets if bucket.members]

    # Filling.

    def _sweep(self, buckets: list[Bucket]) -> bool:
        """Merge single members into open buckets of their slot and level. Returns whether any were merged."""
        merged = False
        levels = _Levels(self.contraction, buckets)
        opened: dict[tuple[Slot, int], Bucket] = {}
        count: dict[Slot, int] = {}
        seen: dict[Slot, int] = {}
        for bucket in buckets:
            slot, single = bucket.slot, bucket.first
            if len(bucket.members) == 1 and not bucket.closed:
                target = opened.get((slot, levels.of(bucket)))
                if target is not None and self._takes(target, single, seen.get(slot, 0)):
                    seen[slot] = seen.get(slot, 0) + bucket.num_bytes
                    self._join(target, bucket)
                    merged = True
                    continue
            number = count[slot] = count.get(slot, -1) + 1
            bucket.cap = self.policy.cap(slot[0], number) if not self.units else UNLIMITED
            bucket.seen_bytes = seen.get(slot, 0)
            if bucket.num_bytes >= bucket.cap:  # full by itself: the open bucket stays open for small members
                self._say_full(bucket)
                continue
            seen[slot] = bucket.seen_bytes + bucket.num_bytes
            bucket.shards = bucket.shards or self._shards(single)
            if len(bucket.members) == 1 and not bucket.closed:
                opened[slot, levels.of(bucket)] = bucket
        return merged

    def _say_full(self, bucket: Bucket) -> None:
        name, size, cap = bucket.first.name, bucket.num_bytes, bucket.cap
        sentence = f"{name} stays alone: its {size_text(size)} fill a bucket of at most {size_text(cap)}"
        self.refusals.setdefault(name, Refusal(Reason.FULL, sentence, name))

    def _takes(self, bucket: Bucket, member: Member, seen_bytes: int) -> bool:
        refusal = self._why_full(bucket, member, seen_bytes) or self._why_not(bucket, member)
        if refusal is None:
            return True
        self.refusals[member.name] = refusal
        self.refusals.setdefault(bucket.first.name, replace(refusal, blocking=member.name))
        return False

    def _why_full(self, bucket: Bucket, member: Member, seen_bytes: int) -> Refusal | None:
        cap, total = bucket.cap, bucket.num_bytes + member.num_bytes
        full = bucket.num_bytes >= cap if self.policy.may_overshoot else total > cap
        if full:
            sentence = (
                f"{member.name} does not join {bucket.first.name}:"
                f" {size_text(total)} together exceed the limit of {size_text(cap)}"
            )
            return Refusal(Reason.FULL, sentence, bucket.first.name)
        passed = seen_bytes - bucket.seen_bytes - bucket.num_bytes
        if passed > cap:  # gathered that early, or sent that late, the tensor would stay in memory in between
            sentence = (
                f"{member.name} does not join {bucket.first.name}:"
                f" other buckets with {size_text(passed)} are launched in between"
            )
            return Refusal(Reason.FULL, sentence, bucket.first.name)
        return None

    def _why_not(self, bucket: Bucket, member: Member, pinned: bool = False) -> Refusal | None:
        first = bucket.first
        if member.key != first.key:
            sentence = f"{member.name} does not join {first.name}: they differ in {_difference(member.key, first.key)}"
            return Refusal(Reason.UNSUPPORTED_FORM, sentence, first.name)
        again = bucket.shards & self._shards(member)
        if again and not pinned:
            sentence = (
                f"{member.name} does not join {first.name}: both gather the same shard, which would stay in memory"
            )
            return Refusal(Reason.HOLDS_MEMORY, sentence, first.name)
        needed = self.contraction.why_not_merge([first.index, member.index])
        if needed is not None:
            blocking = self.dag.nodes[needed].name
            sentence = f"{member.name} does not join {first.name}: {blocking} has to run between them"
            if needed in (m.index for m in (*bucket.members, member)):
                on = "the other" if blocking in (first.name, member.name) else f"{blocking} in the bucket of the other"
                sentence = f"{member.name} does not join {first.name}: one of them depends on {on}"
            return Refusal(Reason.DEPENDENCY, sentence, blocking)
        return None

    def _shards(self, member: Member) -> set[int]:
        """The shards that an all-gather sends, as value numbers: equal numbers mean equal values."""
        if member.key.kind is not Kind.ALL_GATHER:
            return set()
        return {self.numbers.of(source) for source in member.collective.inputs}

    def _join(self, bucket: Bucket, other: Bucket) -> None:
        self.contraction.merge([bucket.first.index, other.first.index])
        bucket.shards |= self._shards(bucket.first) | self._shards(other.first)
        in_order = other.first.index > bucket.members[-1].index
        bucket.members += other.members
        if not in_order:
            bucket.members.sort(key=lambda m: m.index)
        bucket.num_bytes += other.num_bytes
        other.members = []

    # Actions and decisions.

    def _merge(self, bucket: Bucket, place: tuple[tuple[str, ...], str | None, str | None]) -> Merge:
        carried, launch_before, wait_before = place
        payloads = [
            (member.collective, payload) for member in bucket.members for payload in payloads_of(member.collective)
        ]
        owned = tuple(n for n, (collective, payload) in enumerate(payloads) if self._must_own(collective, payload))
        folded = foldable([payload.source for _, payload in payloads], self.strategy, self.touches)
        launches = tuple(member.name for member in bucket.members)
        carried = tuple(name for name in carried if name not in folded)
        last = bucket.members[-1].index
        together = any(self.touches.is_touched(member.collective, member.index, last) for member in bucket.members)
        return Merge(launches, self.strategy, owned, folded, carried, launch_before, wait_before, together)

    def _must_own(self, collective: Collective, payload: Payload) -> bool:
        if written_buffer(collective, payload) is not None:  # the bucket copies the result into it
            return False
        effects = self.dag.effects
        held = {s for node in payload.results for s in effects.held(self.dag.index[node])}
        returned = not self.alias_outputs and not held.isdisjoint(effects.held_by_outputs)
        return (
            returned
            or depends_on_offset(payload.results)
            or any(self.touches.is_overwritten(node, collective.launch) for node in payload.results)
        )

    def _note(self, index: int, refusal: Refusal, *launches: str) -> None:
        self.decisions.append(
            (index, Decision(self.name, refusal.reason, refusal.sentence, launches, refusal.blocking))
        )

    def _decide(self, bucket: Bucket, buckets: list[Bucket]) -> None:
        first, kind = bucket.first, bucket.first.key.kind.phrase
        group = self.groups.canonical(first.key.group)
        if len(bucket.members) > 1 and not bucket.num_bytes:
            for member in bucket.members:
                sentence = f"{member.name} stays: it sends 0 bytes, and so does every collective it could join"
                refusal = Refusal(Reason.ALONE, sentence)
                self._note(member.index, refusal, member.name)
            return
        if len(bucket.members) > 1:
            names = tuple(member.name for member in bucket.members)
            what = f"merged {len(names)} {kind}s of group {group!r} into one of {size_text(bucket.num_bytes)}"
            self._note(
                first.index,
                Refusal(Reason.APPLIED, f"{what}: {first.name} to {names[-1]}"),
                *names,
                *bucket_names(first.name),
            )
            return
        refusal = self.refusals.get(first.name) or self._why_alone(bucket, buckets)
        if is_bucket(first.collective):
            refusal = Refusal(Reason.ALREADY_DONE, f"{first.name} is already a bucket")
        self._note(first.index, refusal, first.name)

    def _why_alone(self, bucket: Bucket, buckets: list[Bucket]) -> Refusal:
        first = bucket.first
        mine = self.contraction.supernode(first.index)
        for other in buckets:
            if other is bucket or other.slot != bucket.slot:
                continue
            theirs = self.contraction.supernode(other.first.index)
            needs, needed = mine.before & theirs.members, theirs.before & mine.members
            if needs or needed:
                relation = "depends on" if needs else "is needed by"
                sentence = f"{first.name} stays alone: it {relation} {other.first.name}"
                return Refusal(Reason.DEPENDENCY, sentence, other.first.name)
        kind, group = first.key.kind, self.groups.canonical(first.key.group)
        like = [other for other in buckets if other is not bucket and other.members]
        if any(other.first.key._replace(dtype=first.key.dtype) == first.key for other in like):
            do = ", and only strategy=pack merges several" if kind in MOVES_DATA else ""
            sentence = f"{first.name} stays alone: the {kind.phrase}s like it in group {group!r} have other dtypes{do}"
            return Refusal(Reason.ALONE, sentence)
        return Refusal(Reason.ALONE, f"{first.name} stays alone: group {group!r} has no other {kind.phrase} like it")


class _Levels:
    """The level of each bucket: the length of the longest chain of buckets of its slot that it depends on."""

    def __init__(self, contraction: Contraction, buckets: list[Bucket]) -> None:
        self.contraction = contraction
        self.masks: dict[Slot, list[int]] = {}
        self.levels: dict[int, int] = {}
        for bucket in buckets:
            masks = self.masks.setdefault(bucket.slot, [])
            before = contraction.before(bucket.first.index)
            low, high = 0, len(masks)  # a bucket that depends on one level depends on every level below it
            while low < high:
                middle = (low + high) // 2
                if before & masks[middle]:
                    low = middle + 1
                else:
                    high = middle
            if low == len(masks):
                masks.append(0)
            masks[low] |= contraction.supernode(bucket.first.index).members
            self.levels[id(bucket)] = low

    def of(self, bucket: Bucket) -> int:
        return self.levels[id(bucket)]


def _difference(first: Key, second: Key) -> str:
    names = ("kind", "group", "group size", "reduce operator", "root", "device", "dtype")
    return ", ".join(name for name, a, b in zip(names, first, second, strict=True) if a != b)
