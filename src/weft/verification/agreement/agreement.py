"""Agreement: checks, without running anything, that the graphs of all ranks can run together.

    found = check([weft.parse(text) for text in listings])     # one graph per rank; they may differ
    print(found)                                               # 8 ranks agree: 4 graphs, 312 launches

Contract: every finding is data. The collectives of each group are the same, in the same order, on all its ranks. Each
send has its receive. No ranks wait for each other in a cycle. For NCCL, launches of groups that share ranks are also in
one order, and transfers between two ranks use their tags in one order. The time is linear in the launches of all ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Literal, NamedTuple

from torch.fx import GraphModule

from weft.errors import VerificationError, compose
from weft.graph.dag import collector_paused
from weft.graph.groups import GroupTable, read_groups
from weft.graph.listings.text import parse, render
from weft.rewriting.draft import Draft
from weft.rewriting.launches import place_in
from weft.rewriting.slices import Slice, slice_on_any_dim
from weft.verification.agreement.deadlock import BlockedRank, cycles
from weft.verification.agreement.issue_order import LABELS, IssuedLaunch, IssuedTransfer, IssueOrder, read_order
from weft.verification.agreement.world import World
from weft.verification.rendezvous import MeetingPlace

Graph = GraphModule | str | IssueOrder
"""A module, a listing, or an issue order."""
Graphs = Sequence[Graph | Sequence[Graph]]
"""For each rank a graph, or several graphs that run one after the other."""


class AgreementFault(StrEnum):
    """Kinds of disagreement between ranks."""

    ORDER = "order"
    """Two ranks launch different things as the k-th launch of a group."""
    MISSING = "missing"
    """A rank launches fewer collectives of a group than another rank."""
    TRANSFER = "transfer"
    """A send or a receive without its partner, or with one of another size or dtype."""
    CYCLE = "cycle"
    """Ranks wait for each other in a cycle."""
    INTERLEAVING = "interleaving"
    """Two ranks launch in shared groups in different orders, which can deadlock on NCCL."""
    TAGS = "tags"
    """Two ranks use the tags of their transfers in different orders; NCCL ignores tags."""


DO = {
    AgreementFault.ORDER: "launch the collectives of a group in the same order on every rank",
    AgreementFault.MISSING: "launch the collectives of a group on every rank of the group",
    AgreementFault.TRANSFER: "give each send a receive of the same size and dtype on the other rank",
    AgreementFault.CYCLE: "move the launches that other ranks wait for before the wait that blocks",
    AgreementFault.INTERLEAVING: "launch in the same order on both ranks; put transfers that cross into one batch",
    AgreementFault.TAGS: "launch the transfers between two ranks in the same order on both",
}


class At(NamedTuple):
    """A node on a rank."""

    rank: int
    node: str


@dataclass(frozen=True)
class Finding:
    """One disagreement between ranks."""

    fault: AgreementFault
    group: str
    where: tuple[At, ...]
    """The nodes involved; the first belongs to the rank that differs from the others, if there is one."""
    sentence: str

    @property
    def rank(self) -> int:
        return self.where[0].rank

    @property
    def node(self) -> str:
        return self.where[0].node

    def __str__(self) -> str:
        return f"{self.sentence}\n    {DO[self.fault]}"


@dataclass(frozen=True)
class Agreement:
    """The disagreements between ranks, if any."""

    findings: tuple[Finding, ...]
    num_ranks: int
    num_graphs: int
    """Number of different graphs."""
    num_launches: int
    """Number of launches of all ranks together."""

    @property
    def holds(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        size = f"{self.num_graphs} {'graph' if self.num_graphs == 1 else 'graphs'}, {self.num_launches} launches"
        if self.holds:
            return f"{self.num_ranks} ranks agree: {size}"
        return "\n".join([f"{self.num_ranks} ranks do not agree: {size}", *map(str, self.findings)])


def check(
    graphs: Graphs,
    tables: Sequence[GroupTable] | None = None,
    *,
    backend: Literal["nccl", "gloo"] = "nccl",
) -> Agreement:
    """Check the graphs of all ranks. For `gloo`, interleaving and the order of tags do not matter."""
    with collector_paused():
        return _check(graphs, tables, backend == "nccl")


def _check(graphs: Graphs, tables: Sequence[GroupTable] | None, for_nccl: bool) -> Agreement:
    world = World.of(read_orders(graphs, tables))
    findings = [finding for place in world.name_at for finding in _compare(world, place)]
    wrong = list(_wrong_peers(world))
    findings += wrong or _match_transfers(world, with_tags=for_nccl)
    # Ranks that can run one launch at a time can also run several, so the second search is needed only after a find.
    interleavings = [] if wrong else cycles(world, one_at_a_time=True)
    if interleavings:
        findings += map(_circle, cycles(world))
    if not findings and for_nccl:  # after another fault, findings about interleaving would be noise
        findings += map(_interleaving, interleavings)
    num_launches = sum(len(world.order(rank).launches) for rank in range(len(world.order_of)))
    return Agreement(tuple(findings), len(world.order_of), len(world.orders), num_launches)


def read_orders(graphs: Graphs, tables: Sequence[GroupTable] | None = None) -> list[IssueOrder]:
    """The issue order of each rank; a graph that several ranks share is read once."""
    texts: dict[str, GraphModule] = {}
    ranks: list[list[GraphModule | IssueOrder]] = []
    for given in graphs:
        several: Sequence[Graph] = [given] if isinstance(given, GraphModule | str | IssueOrder) else given
        ranks.append([texts.setdefault(g, texts.get(g) or parse(g)) if isinstance(g, str) else g for g in several])
    known: dict[int, GroupTable] = {}
    held: list[list[GroupTable]] = []
    for rank, several in enumerate(ranks):
        if tables is None:
            for graph in several:
                if isinstance(graph, GraphModule) and id(graph) not in known:
                    known[id(graph)] = read_groups(graph)
        own = tables[rank] if tables is not None else GroupTable()
        held.append([known.get(id(graph), own) for graph in several])
    orders: dict[tuple[int, int], IssueOrder] = {}
    found: list[IssueOrder] = []
    joined: dict[tuple[tuple[int, int], ...], IssueOrder] = {}
    for several, placed in zip(ranks, _placed(held), strict=True):
        keys = tuple((id(graph), id(table)) for graph, table in zip(several, placed, strict=True))
        if keys not in joined:
            for key, graph, table in zip(keys, several, placed, strict=True):
                if key not in orders:
                    orders[key] = read_order(graph, table)
            first, *rest = [orders[key] for key in keys] or [IssueOrder(())]
            joined[keys] = functools.reduce(IssueOrder.then, rest, first)
        found.append(joined[keys])
    return found


def _placed(tables: list[list[GroupTable]]) -> list[list[GroupTable]]:
    """Fill in the ranks of groups whose ranks are unknown: the ranks that use the same run-time name of the group.

    A graph that several ranks share has the run-time names of one of them. This suffices if that graph is the only
    one, or if the group contains all ranks.
    """
    num_ranks = len(tables)
    users: dict[str, dict[int, None]] = {}
    sizes: dict[str, int] = {}
    owners: dict[int, set[int]] = {}
    for rank, several in enumerate(tables):
        for table in several:
            owners.setdefault(id(table), set()).add(rank)
            for name in sorted(table.unplaced):
                key = table.runtime[name]
                users.setdefault(key, {})[rank] = None
                sizes[key] = max(sizes.get(key, 0), table.groups[name].size)
    placed: dict[int, GroupTable] = {}
    for several in tables:
        for table in several:
            if table.unplaced and id(table) not in placed:
                is_shared = len(owners[id(table)]) > 1
                if not is_shared or len(owners) > 1:
                    placed[id(table)] = _with_ranks(table, users, sizes, num_ranks, is_shared)
    return [[placed.get(id(table), table) for table in several] for several in tables]


def _with_ranks(
    table: GroupTable,
    users: Mapping[str, Mapping[int, None]],
    sizes: Mapping[str, int],
    num_ranks: int,
    is_shared: bool,
) -> GroupTable:
    groups = dict(table.groups)
    for name in sorted(table.unplaced):
        key = table.runtime[name]
        ranks = tuple(users[key])
        size = sizes[key] or (num_ranks if len(ranks) == num_ranks else 0)
        if len(ranks) != size or (is_shared and size != num_ranks):
            told = f"it has {size} ranks" if size else "its size is unknown"
            launch = ", ".join(map(str, ranks))
            what = f"the ranks of group {key!r} are unknown: {told}, and ranks {launch} launch in it"
            raise VerificationError(compose("agreement", what, do="give one graph for each rank"))
        rest = tuple((rank,) for rank in range(num_ranks) if rank not in users[key])
        whole = replace(groups[name], size=size, stride=1, ranks=(ranks, *rest) if rest else None)
        groups[name] = whole.called(name, key)
    return replace(table, groups=groups, unplaced=frozenset())


def withheld(graphs: Graphs, tables: Sequence[GroupTable] | None = None) -> list[dict[str, str]]:
    """For each rank, the groups whose launches must not be merged, each with the reason.

    Pass the entry of a rank to `weft.optimize` as `withheld`. Each rank plans from its own graph. So ranks merge the
    launches of a group in the same way only if they all have the same sequence of launches and waits of that group.
    """
    world = World.of(read_orders(graphs, tables))
    shown = [_shown(order) for order in world.orders]
    found: list[dict[str, str]] = [{} for _ in world.order_of]
    for place, names in world.name_at.items():
        sights = [shown[world.order_of[rank]].get(names.get(rank, "")) for rank in place.members]
        other = next((r for r, sight in zip(place.members, sights, strict=True) if sight != sights[0]), None)
        if other is None:
            continue
        for rank, name in names.items():
            ranks = f"rank {place.members[0]} and rank {other}"
            found[rank][name] = f"{ranks} have different sequences of launches and waits in group {name!r}"
    return found


def own_parts(graphs: Sequence[GraphModule]) -> tuple[str, ...]:
    """The nodes that slice out the part of their own rank on every rank, for the option `own` of some passes.

    `graphs` holds one graph per rank. The graphs may differ only in which part each rank takes; otherwise the result is
    empty. For every group whose size fits the number of parts, the part must be the one at the rank's position.
    """
    texts = [render(graph).splitlines() for graph in graphs]
    tables = [read_groups(graph) for graph in graphs]
    if len({len(lines) for lines in texts}) != 1:
        return ()
    names: list[str] = []
    for lines in zip(*texts, strict=True):
        heads = {line.partition(" = ")[0] for line in lines}
        if len(set(lines)) > 1 and len(heads) > 1:
            return ()
        names += [heads.pop().partition(":")[0].strip()] if len(set(lines)) > 1 else []
    drafts = [Draft(graph.graph) for graph in graphs]
    nodes = [{node.name: node for node in graph.graph.nodes} for graph in graphs]
    pieces = {
        name: [slice_on_any_dim(draft, held[name]) for draft, held in zip(drafts, nodes, strict=True)] for name in names
    }
    if any(piece is None for found in pieces.values() for piece in found):
        return ()
    return tuple(name for name, found in pieces.items() if _are_own(found, tables))


def _are_own(pieces: Sequence[Slice | None], tables: Sequence[GroupTable]) -> bool:
    if len({(piece.source.name, piece.dim, piece.size) for piece in pieces if piece is not None}) != 1:
        return False
    for rank, (piece, table) in enumerate(zip(pieces, tables, strict=True)):
        size = piece.end - piece.start if piece is not None else 0
        groups = [group for group in table if piece is not None and size and group.size * size == piece.size]
        places = [place_in(group, rank) for group in groups]
        if piece is None or not groups or any(place is None or place * size != piece.start for place in places):
            return False
    return True


def _shown(order: IssueOrder) -> dict[str, tuple[object, ...]]:
    """For each group its launches, and which of them each wait completes."""
    found: dict[str, list[object]] = {name: [] for name in order.groups}
    numbers: list[tuple[str, int]] = []
    for event in order.events:
        if isinstance(event, IssuedLaunch):
            seen = found[event.group]
            numbers.append((event.group, len(seen)))
            seen.append((event.signature, event.splits, event.transfers))
            continue
        for number, part in event.parts:
            group, position = numbers[number]
            found[group].append((position, part))
    return {name: tuple(seen) for name, seen in found.items()}


# Collectives.


def _compare(world: World, place: MeetingPlace) -> Iterator[Finding]:
    """The first launch on which the ranks of a place disagree."""
    names = world.name_at[place]
    none: tuple[IssuedLaunch, ...] = ()
    sequences = [world.order(r).sequences[names[r]] if r in names else none for r in place.members]
    if all(sequence is sequences[0] for sequence in sequences) and _are_even(sequences[0]):
        return
    for number, launches in enumerate(zip(*sequences, strict=False), 1):
        difference = _difference(launches, place) or _splits_differ(launches, place)
        if difference is not None:
            what, positions = difference
            where = tuple(At(place.members[p], launches[p].node) for p in positions)
            sentence = f"the ranks of {place} disagree on launch {number}: {what}"
            yield Finding(AgreementFault.ORDER, place.group, where, sentence)
            return
    shortest = min(range(len(sequences)), key=lambda p: len(sequences[p]))
    longest = max(range(len(sequences)), key=lambda p: len(sequences[p]))
    if len(sequences[shortest]) < len(sequences[longest]):
        less, more = place.members[shortest], place.members[longest]
        extra = sequences[longest][len(sequences[shortest])].node
        last = next((launch.node for launch in reversed(sequences[shortest])), "no launch")
        counts = [_collectives(len(sequences[p])) for p in (shortest, longest)]
        what = f"in {place}, rank {less} launches {counts[0]} and rank {more} launches {counts[1]}"
        yield Finding(
            AgreementFault.MISSING, place.group, (At(less, last), At(more, extra)), f"{what}: {extra} has no partner"
        )


def _collectives(count: int) -> str:
    return "no collective" if not count else "1 collective" if count == 1 else f"{count} collectives"


def _are_even(sequence: Iterable[IssuedLaunch]) -> bool:
    return all(launch.splits is None or launch.splits.are_even for launch in sequence)


def _difference(launches: Sequence[IssuedLaunch], place: MeetingPlace) -> tuple[str, list[int]] | None:
    """A phrase for how launches that meet differ, and the positions of the odd one out and of another."""
    if all(launch.signature == launches[0].signature for launch in launches):
        return None
    for label, values in zip(LABELS, zip(*(launch.signature for launch in launches), strict=True), strict=True):
        known = Counter(value for value in values if not _is_unknown(value))
        if len(known) < 2:
            continue
        common = max(known, key=lambda value: known[value])  # the first if several are equally common
        odd = next(p for p, value in enumerate(values) if value in known and value != common)
        other = values.index(common)
        texts = [f"{_text(values[p])} on rank {place.members[p]}" for p in sorted((odd, other))]
        return f"the {label} is {', '.join(texts)}", [odd, other]
    return None


def _is_unknown(value: object) -> bool:
    return isinstance(value, tuple) and None in value


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)  # type: ignore[arg-type]


def _splits_differ(launches: Sequence[IssuedLaunch], place: MeetingPlace) -> tuple[str, list[int]] | None:
    """A phrase for two members of an all-to-all whose splits do not match, and their positions."""
    splits = [launch.splits for launch in launches]
    if all(part is None or (part == splits[0] and part.are_even) for part in splits):
        return None
    for sender, receiver in product(range(len(splits)), repeat=2):
        mine, theirs = splits[sender], splits[receiver]
        if mine is None or theirs is None:
            continue
        sent, expected = mine.sent[receiver], theirs.expected[sender]
        if None not in (sent, expected) and sent != expected:
            ranks = [place.members[p] for p in (sender, receiver)]
            what = f"rank {ranks[0]} sends {sent} elements to rank {ranks[1]}, which expects {expected}"
            return what, [sender, receiver]
    return None


# Transfers.


class _End(NamedTuple):
    """One end of a transfer, with its node and rank."""

    at: At
    transfer: IssuedTransfer


def _wrong_peers(world: World) -> Iterator[Finding]:
    """Transfers whose peer is not another rank of their group."""
    for rank, places in enumerate(world.places):
        for launch in world.order(rank).launches:
            for transfer in launch.transfers:
                members = places[launch.group].members
                if not 0 <= transfer.peer < len(members) or members[transfer.peer] == rank:
                    what = f"{launch.node} of rank {rank} names peer {transfer.peer}"
                    sentence = f"{what}, which is not another rank within the group, which has {len(members)} ranks"
                    yield Finding(AgreementFault.TRANSFER, launch.group, (At(rank, launch.node),), sentence)


def _match_transfers(world: World, with_tags: bool) -> list[Finding]:
    pairs: dict[tuple[MeetingPlace, int, int], tuple[list[_End], list[_End]]] = {}
    for rank, places in enumerate(world.places):
        for launch in world.order(rank).launches:
            for transfer in launch.transfers:
                place = places[launch.group]
                peer = place.members[transfer.peer]
                ends = (rank, peer) if transfer.is_send else (peer, rank)
                sides = pairs.setdefault((place, *ends), ([], []))
                sides[0 if transfer.is_send else 1].append(_End(At(rank, launch.node), transfer))
    findings: list[Finding] = []
    for (place, source, destination), (sends, receives) in pairs.items():
        by_tag = [_by_tag(side) for side in (sends, receives)]
        between = replace(place, members=(source, destination))
        found = [
            finding
            for tag in dict.fromkeys([*by_tag[0], *by_tag[1]])
            for finding in _match(replace(between, tag=tag), by_tag[0].get(tag, []), by_tag[1].get(tag, []))
        ]
        if not found and with_tags:
            found = list(_compare_tags(between, sends, receives))
        findings += found
    return findings


def _by_tag(side: Iterable[_End]) -> dict[int, list[_End]]:
    found: dict[int, list[_End]] = {}
    for end in side:
        found.setdefault(end.transfer.tag, []).append(end)
    return found


def _match(place: MeetingPlace, sends: Sequence[_End], receives: Sequence[_End]) -> Iterator[Finding]:
    """The first transfer of one tag between two ranks that does not match."""
    source, destination = place.members
    for number, (send, receive) in enumerate(zip(sends, receives, strict=False), 1):
        texts = [f"{end.transfer.number_of_elements} elements of {end.transfer.dtype}" for end in (send, receive)]
        sizes = [end.transfer.number_of_elements for end in (send, receive)]
        is_known = None not in sizes
        if send.transfer.dtype != receive.transfer.dtype or (is_known and sizes[0] != sizes[1]):
            what = (
                f"transfer {number} of {place}: {send.at.node} sends {texts[0]}, {receive.at.node} expects {texts[1]}"
            )
            yield Finding(AgreementFault.TRANSFER, place.group, (send.at, receive.at), what)
            return
    if len(sends) != len(receives):
        more = sends if len(sends) > len(receives) else receives
        alone = more[min(len(sends), len(receives))].at
        counts = f"rank {source} sends {_times(len(sends))} to rank {destination}"
        counts += f" with tag {place.tag} in group {place.group!r}, which receives {_times(len(receives))}"
        yield Finding(AgreementFault.TRANSFER, place.group, (alone,), f"{counts}: {alone.node} has no partner")


def _times(count: int) -> str:
    return "never" if not count else "once" if count == 1 else f"{count} times"


def _compare_tags(place: MeetingPlace, sends: Sequence[_End], receives: Sequence[_End]) -> Iterator[Finding]:
    for number, (send, receive) in enumerate(zip(sends, receives, strict=True), 1):
        tags = (send.transfer.tag, receive.transfer.tag)
        if tags[0] != tags[1]:
            what = f"transfer {number} in group {place.group!r} from rank {place.members[0]} to rank {place.members[1]}"
            sentence = f"{what} is sent with tag {tags[0]} and received with tag {tags[1]}"
            yield Finding(AgreementFault.TAGS, place.group, (send.at, receive.at), f"{sentence}, but NCCL ignores tags")
            return


# Cycles.


def _circle(stands: Sequence[BlockedRank]) -> Finding:
    after = [*stands[1:], stands[0]]
    parts = [
        f"rank {s.rank} at {s.node} waits for {_named(s)}, which rank {s.missing} launches after {n.node}"
        for s, n in zip(stands, after, strict=True)
    ]
    where = tuple(At(stand.rank, stand.node) for stand in stands)
    return Finding(AgreementFault.CYCLE, stands[0].place.group, where, f"cyclic wait: {'; '.join(parts)}")


def _interleaving(stands: Sequence[BlockedRank]) -> Finding:
    after = [*stands[1:], stands[0]]
    parts = [
        f"rank {s.rank} launches {_named(s)}, which rank {s.missing} launches after {_named(n)}"
        for s, n in zip(stands, after, strict=True)
    ]
    where = tuple(At(stand.rank, stand.launch.node) for stand in stands)
    sentence = f"launches that may deadlock on NCCL: {'; '.join(parts)}"
    return Finding(AgreementFault.INTERLEAVING, stands[0].place.group, where, sentence)


def _named(stand: BlockedRank) -> str:
    return f"{stand.launch.node} of group {stand.place.group!r}"
