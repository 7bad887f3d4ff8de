"""Line up the collectives that a plan predicts with those that a step launched, and say where the two differ.

Two collectives correspond if they have the same group, kind and size, and are the k-th of these on both sides. A
property that the trace lacks, such as the size of a collective in a CUDA graph, is not compared. Pairs whose order
differs are `moved`: the fewest that must be taken out to leave the rest in order. Collectives without a partner whose
sizes add up to the same sum on both sides are `regrouped`: merged differently from the plan.

Order is compared over all groups if the trace says when the host launched each collective, otherwise inside each group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from weft.cost.calibration.measured_step import MeasuredStep, TracedGroup
from weft.errors import GraphError
from weft.graph.groups import Group
from weft.graph.ops import POINT_TO_POINT, Kind
from weft.simulation.predicted_step import PredictedCollective, PredictedStep

OUTSIDE = frozenset({kind.value for kind in POINT_TO_POINT} | {Kind.BARRIER.value})
"""Kinds that are not compared: traces do not match the two ends of a transfer."""


@dataclass(frozen=True)
class Regrouping:
    """Collectives that ran merged differently: the same bytes in another number of launches."""

    planned: tuple[int, ...]
    ran: tuple[int, ...]


@dataclass(frozen=True)
class Alignment:
    """Positions of corresponding collectives, among the planned and among those that ran."""

    planned: tuple[PredictedCollective, ...]
    """Those that can be compared, in launch order."""
    groups: dict[str, str]
    """Planned group by the run-time name of the trace's group."""
    pairs: tuple[tuple[int, int], ...]
    """(planned, ran), in planned order."""
    moved: tuple[tuple[int, int], ...]
    """Pairs that ran earlier or later than planned."""
    regrouped: tuple[Regrouping, ...]
    missing: tuple[int, ...]
    """Planned, but did not run."""
    extra: tuple[int, ...]
    """Ran among the planned collectives without being planned."""
    outside: tuple[int, ...]
    """Ran before the first or after the last planned collective, or in a group that the plan does not have."""
    first: tuple[int | None, int | None] | None
    """The first position at which the orders differ: planned and ran; None for the end of a side."""

    @property
    def is_as_planned(self) -> bool:
        """Whether exactly the planned collectives ran, in the planned order."""
        return not (self.moved or self.regrouped or self.missing or self.extra)


@dataclass(frozen=True)
class _Key:
    """The properties that identify a collective. Empty, or None: unknown."""

    group: str
    kind: str
    num_bytes: int | None


def align(prediction: PredictedStep, step: MeasuredStep) -> Alignment:
    """Line up a prediction with a measured step."""
    sizes = {group.name: group.size for group in prediction.groups}
    planned = tuple(
        each
        for each in prediction.collectives
        if each.kind not in OUTSIDE and sizes.get(each.group) != 1 and each.num_bytes != 0
    )
    keys = [_Key(each.group, each.kind, each.num_bytes) for each in planned]
    counts = Counter((each.group, each.kind.value, each.num_bytes) for each in step.collectives)
    groups = match_groups(prediction.groups, Counter(keys), step.groups, counts)
    ran = [_Key(_planned_name(each.group, groups), each.kind.value, each.num_bytes) for each in step.collectives]
    pairs = _pair(keys, ran)
    by_all = step.has_launch_order
    moved = [
        pair
        for scope in _scopes(pairs, lambda pair: "" if by_all else keys[pair[0]].group)
        for pair in _out_of_order(scope)
    ]
    partner, paired = dict(pairs), {j for _, j in pairs}
    alone = [i for i in range(len(keys)) if i not in partner]
    regrouped = _regroup(keys, ran, alone, [j for j in range(len(ran)) if j not in paired])
    run = {i for each in regrouped for i in each.planned}
    known = paired | {j for each in regrouped for j in each.ran}
    missing = [i for i in alone if i not in run]
    unplanned = [j for j in range(len(ran)) if j not in known]
    inner = range(min(known, default=0), max(known, default=len(ran)) + 1)
    foreign = {j for j in unplanned if ran[j].group.startswith("?") or (not missing and j not in inner)}
    extra = [j for j in unplanned if j not in foreign]
    ordered = [j for j in range(len(ran)) if j not in foreign]
    return Alignment(
        planned,
        groups,
        tuple(pairs),
        tuple(sorted(moved)),
        tuple(regrouped),
        tuple(missing),
        tuple(extra),
        tuple(sorted(foreign)),
        _first_difference(keys, ran, partner, ordered, by_all),
    )


def _planned_name(group: str, groups: dict[str, str]) -> str:
    return groups.get(group, f"?{group}") if group else ""


def match_groups(
    planned: Iterable[Group],
    uses: Counter[_Key],
    traced: Iterable[TracedGroup],
    ran: Counter[tuple[str, str, int | None]],
) -> dict[str, str]:
    """The planned group of each traced group, by run-time name.

    Groups of different sizes never match. The mesh axis counts most, then the name, then the ranks, then the number of
    collectives that both sides have.
    """
    candidates: list[tuple[tuple[int, ...], str, str]] = []
    for mine in planned:
        for theirs in traced:
            if mine.size and theirs.num_ranks and mine.size != theirs.num_ranks:
                continue
            shared = sum(
                min(count, ran[theirs.name, key.kind, key.num_bytes])
                for key, count in uses.items()
                if key.group == mine.name
            )
            named = theirs.axis == mine.name, theirs.name == mine.name, _has_ranks(mine, theirs.ranks)
            candidates.append(((*map(int, named), shared), mine.name, theirs.name))
    found: dict[str, str] = {}
    for score, mine, theirs in sorted(candidates, key=lambda each: (*(-n for n in each[0]), each[1], each[2])):
        if theirs not in found and mine not in found.values() and any(score):
            found[theirs] = mine
    return found


def _has_ranks(group: Group, ranks: tuple[int, ...]) -> bool:
    if not ranks:
        return False
    try:
        return ranks in group.partition(group.span * (ranks[-1] // group.span + 1))
    except GraphError:
        return False


def _pair(planned: Sequence[_Key], ran: Sequence[_Key]) -> list[tuple[int, int]]:
    """Pair the k-th of each key, with the most precise key first."""
    found: dict[int, int] = {}
    taken: set[int] = set()

    def pair_by(key_of: Callable[[_Key], Hashable], applies: Callable[[_Key], bool]) -> None:
        queues: dict[Hashable, deque[int]] = {}
        for j, key in enumerate(ran):
            if j not in taken and applies(key):
                queues.setdefault(key_of(key), deque()).append(j)
        for i, key in enumerate(planned):
            queue = queues.get(key_of(key)) if i not in found else None
            if queue:
                found[i] = queue.popleft()
                taken.add(found[i])

    pair_by(lambda key: key, lambda _: True)
    pair_by(lambda key: (key.kind, key.num_bytes), lambda key: not key.group)
    pair_by(lambda key: (key.group, key.kind), lambda key: key.num_bytes is None)
    pair_by(lambda key: key.kind, lambda key: not key.group and key.num_bytes is None)
    return sorted(found.items())


def _scopes(
    pairs: Iterable[tuple[int, int]], scope_of: Callable[[tuple[int, int]], str]
) -> Iterable[list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for pair in pairs:
        found.setdefault(scope_of(pair), []).append(pair)
    return found.values()


def _out_of_order(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs outside of a longest run of increasing positions."""
    tails: list[int] = []
    """For each length, the index of the pair with the smallest position at which such a run can end."""
    before = [-1] * len(pairs)
    ends: list[int] = []
    for k, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before[k] = tails[length - 1] if length else -1
        if length == len(tails):
            tails.append(k)
            ends.append(j)
        else:
            tails[length], ends[length] = k, j
    kept: set[int] = set()
    k = tails[-1] if tails else -1
    while k >= 0:
        kept.add(k)
        k = before[k]
    return [pair for k, pair in enumerate(pairs) if k not in kept]


def _regroup(
    planned: Sequence[_Key], ran: Sequence[_Key], alone: Iterable[int], unplanned: Iterable[int]
) -> list[Regrouping]:
    """Runs of collectives without a partner that have the same group, kind and total size."""
    sides: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    for i in alone:
        sides.setdefault((planned[i].group, planned[i].kind), ([], []))[0].append(i)
    for j in unplanned:
        sides.setdefault((ran[j].group, ran[j].kind), ([], []))[1].append(j)
    found: list[Regrouping] = []
    for mine, theirs in sides.values():
        i = j = first_i = first_j = 0
        expected = sent = 0
        while i < len(mine) or j < len(theirs):
            if expected <= sent and i < len(mine):
                expected += planned[mine[i]].num_bytes or 0
                i += 1
            elif sent < expected and j < len(theirs):
                sent += ran[theirs[j]].num_bytes or 0
                j += 1
            else:
                break
            if expected == sent and expected:
                found.append(Regrouping(tuple(mine[first_i:i]), tuple(theirs[first_j:j])))
                first_i, first_j, expected, sent = i, j, 0, 0
    return found


def _first_difference(
    planned: Sequence[_Key], ran: Sequence[_Key], pairs: dict[int, int], ordered: Sequence[int], by_all: bool
) -> tuple[int | None, int | None] | None:
    """Where the two orders differ first, over all groups or in the group where the plan notices first."""
    group_of_ran = {j: planned[i].group for i, j in pairs.items()}
    mine: dict[str, list[int]] = {}
    theirs: dict[str, list[int]] = {}
    for i, key in enumerate(planned):
        mine.setdefault("" if by_all else key.group, []).append(i)
    for j in ordered:
        theirs.setdefault("" if by_all else group_of_ran.get(j, ran[j].group), []).append(j)
    found: list[tuple[int | None, int | None]] = []
    for scope in {**mine, **theirs}:
        left, right = mine.get(scope, []), theirs.get(scope, [])
        for k in range(max(len(left), len(right))):
            i, j = left[k] if k < len(left) else None, right[k] if k < len(right) else None
            if i is None or j is None or pairs.get(i) != j:
                found.append((i, j))
                break
    return min(found, key=lambda each: len(planned) if each[0] is None else each[0], default=None)
