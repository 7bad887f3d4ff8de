"""Prices: how long several launches would take as one, for a scheduler that may merge launches.

Only the strategy `coalesced` is priced: one operator that takes a list of tensors. It packs nothing, so its time is one
latency plus the bytes of all members, and each member keeps its own wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from torch.fx import Node

from weft.bucketing.eligibility import COALESCED, Key, Member, is_bucket, read_member
from weft.cost.cluster import Cluster
from weft.cost.prices import full_bytes
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.groups import Group, GroupTable
from weft.graph.ops import Kind
from weft.scheduling.jobs import Jobs
from weft.scheduling.scheduler import NEVER


class BucketPrices:
    """Keys and merged durations of the launches of one program."""

    def __init__(
        self,
        dag: Dag,
        jobs: Jobs,
        groups: GroupTable,
        cluster: Cluster,
        kinds: frozenset[Kind] = COALESCED,
        withheld: Mapping[str, str] | None = None,
        max_bytes: int | None = None,
        nodes: Sequence[Node] | None = None,
    ) -> None:
        """`nodes` are the nodes of the operations; None: those of the Dag, in order."""
        nodes = dag.nodes if nodes is None else nodes
        self.cluster = cluster
        self.max_bytes = max_bytes
        self.keys = [-1] * len(jobs)
        self.num_bytes = [0] * len(jobs)
        self.groups: list[tuple[Kind, Group]] = []
        """Kind and group of each key."""
        known: dict[Key, int] = {}
        self.prices: dict[tuple[int, int], int] = {}
        for job, queue in enumerate(jobs.queue):
            if queue < 0 or jobs.program.queues[queue].is_copies:
                continue
            collective = Collective(nodes[jobs.ops[job][0]])
            member = read_member(collective, dag, "coalesced")
            if not isinstance(member, Member) or not _is_plain(collective) or member.key.kind not in kinds:
                continue
            if withheld and groups.canonical(member.key.group) in withheld:
                continue
            if member.key not in known:
                known[member.key] = len(known)
                self.groups.append((member.key.kind, groups.group(member.key.group)))
            self.keys[job], self.num_bytes[job] = known[member.key], full_bytes(collective) or 0

    def key(self, launch: int) -> int:
        """Launches with the same key may be merged; -1: this launch may not."""
        return self.keys[launch]

    def latency(self, launch: int) -> int:
        """Fixed cost of a launch in nanoseconds: its duration without any bytes."""
        key = self.keys[launch]
        if (key, 0) not in self.prices:
            kind, group = self.groups[key]
            self.prices[key, 0] = ceil(self.cluster.estimate(kind, group, 0).us * 1000)
        return self.prices[key, 0]

    def duration(self, launches: Sequence[int]) -> int:
        """Duration of launches of one key merged into one, in nanoseconds; NEVER if they exceed `max_bytes`."""
        key, total = self.keys[launches[0]], sum([self.num_bytes[launch] for launch in launches])
        if self.max_bytes is not None and total > self.max_bytes and len(launches) > 1:
            return NEVER
        if (key, total) not in self.prices:
            kind, group = self.groups[key]
            self.prices[key, total] = ceil(self.cluster.estimate(kind, group, total).us * 1000)
        return self.prices[key, total]


def _is_plain(collective: Collective) -> bool:
    return collective.is_functional and not collective.form.coalesced and not is_bucket(collective)
