"""Chain: choices from everything kept to everything made again, each step the cheapest by an estimate.

Contract: a choice is a number for each group of sites: so many of its first sites are made again, or offloaded to host
memory if the number is negative. The first layers come first, because their values are held longest. The estimate adds
up the work that a choice repeats and charges two rates for it: how much longer a step becomes with more compute, and
with more communication. Where the wire is the bottleneck, compute is nearly free, and the other way round. Only the
order of the chain depends on the estimate; the planner judges every choice that is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from weft.compat import input_nodes
from weft.retention.offloading import Offloading
from weft.retention.sites import Sites
from weft.simulation.program import OpKind

Choice = tuple[int, ...]
NEVER = float("inf")
LEAST_RATE, MOST_RATE = 0.02, 1.5
"""Limits of the rates: no work is quite free, and none costs much more than its own time."""


@dataclass(frozen=True)
class Rates:
    """How much longer a step becomes for each nanosecond of work that is repeated."""

    compute: float = 1.0
    links: float = 0.5
    hidden_ns: int = 0
    """Time of copies in one direction that compute can hide."""

    def cost_ns(self, work: RepeatedWork) -> float:
        """The estimated cost of repeated work."""
        copies = LEAST_RATE * work.copy_ns + max(0, work.copy_ns - self.hidden_ns)
        return self.compute * work.compute_ns + self.links * sum(work.link_ns) + copies


def rate_of(more_step_ns: int, more_work_ns: int, otherwise: float) -> float:
    """The rate that a longer step shows for more work."""
    return min(max(more_step_ns / more_work_ns, LEAST_RATE), MOST_RATE) if more_work_ns > 0 else otherwise


def kept_sites(sites: Sites, choice: Choice) -> frozenset[int]:
    """The free sites that a choice keeps."""
    kept = set(sites.stops | sites.kept_anyway)
    for group, again in zip(sites.groups, choice, strict=True):
        kept.update(group.sites[abs(again) :])
        kept.difference_update(group.sites[: abs(again)])
    return frozenset(kept)


def offloaded_sites(sites: Sites, choice: Choice) -> frozenset[int]:
    """The sites that a choice offloads."""
    return frozenset(
        site for group, number in zip(sites.groups, choice, strict=True) for site in group.sites[: max(-number, 0)]
    )


@dataclass(frozen=True)
class RepeatedWork:
    """Work and memory of a choice: time of compute, time of each link, bytes that wait for the late part."""

    compute_ns: int
    link_ns: tuple[int, ...]
    num_bytes: int
    held: frozenset[int] = frozenset()
    """The sites that wait for the late part."""
    copy_ns: int = 0
    """Time of the copies to host memory; those back take as long."""
    host_bytes: int = 0
    """Bytes that wait in host memory."""


class Estimator:
    """Adds up the work of choices for one program."""

    def __init__(self, sites: Sites, offloading: Offloading | None = None) -> None:
        self.sites, self.program, self.offloading = sites, sites.program, offloading
        index = sites.dag.index
        self.sources = [[index[source] for source in input_nodes(node)] for node in sites.dag.nodes[: sites.cut]]

    def compute_ns(self, op: int) -> int:
        """The time of an operation on the compute stream."""
        return self.program.duration_ns[op] if self.program.kinds[op] is OpKind.COMPUTE else 0

    def link_ns(self, op: int) -> int:
        """The time of a collective's bytes. Merged with others it takes no more."""
        latency = self.program.latency_ns[op] if self.program.latency_ns else 0
        return self.program.duration_ns[op] - latency

    def work(self, choice: Choice) -> RepeatedWork:
        """The work that a choice repeats, and the bytes that it keeps."""
        sites, program, kept = self.sites, self.program, kept_sites(self.sites, choice)
        offloaded = offloaded_sites(sites, choice)
        compute, links, num_bytes, copy_ns, host_bytes = 0, [0] * len(program.links), 0, 0, 0
        seen: set[int] = set()
        held: set[int] = set()
        away: set[int] = set()
        stack = list(sites.needed)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            site = sites.site_of[node]
            if not sites.is_free(site) or site in kept:
                if site >= 0 and site not in held:
                    held.add(site)
                    num_bytes += sites.num_bytes[site]
                continue
            if site in offloaded:
                if site not in away and self.offloading is not None:
                    away.add(site)
                    copy_ns += self.offloading.copy_ns(site)
                    host_bytes += sites.num_bytes[site]
                continue
            if program.kinds[node] is OpKind.LAUNCH:
                links[program.queues[program.queue[node]].link] += self.link_ns(node)
            compute += self.compute_ns(node)
            stack += self.sources[node]
        return RepeatedWork(compute, tuple(links), num_bytes, frozenset(held), copy_ns, host_bytes)


def chain(estimator: Estimator, rates: Rates) -> Iterator[Choice]:
    """Choices from everything kept to everything made again, one group more each time, the best ratio first.

    Ratios mostly grow as more groups are made again, so a stale one is computed anew when its turn comes. Those of
    sources become known only once other values are made from them; until then they free nothing.
    """
    groups = estimator.sites.groups
    choice = (0,) * len(groups)
    now = estimator.work(choice)
    yield choice
    waiting = [(_ratio(estimator, rates, now, choice, k), k) for k in range(len(groups))]
    heapq.heapify(waiting)
    while waiting:
        if waiting[0][0] == NEVER:
            waiting = [(_ratio(estimator, rates, now, choice, k), k) for _, k in waiting]
            heapq.heapify(waiting)
            if waiting[0][0] == NEVER:
                return
        _, k = heapq.heappop(waiting)
        ratio = _ratio(estimator, rates, now, choice, k)
        if ratio == NEVER or (waiting and ratio > waiting[0][0]):
            heapq.heappush(waiting, (ratio, k))
            continue
        choice, now = _best_change(estimator, rates, now, choice, k)
        yield choice


def with_group(choice: Choice, k: int, again: int) -> Choice:
    """The choice with another number for one group."""
    return (*choice[:k], again, *choice[k + 1 :])


def _made_again(estimator: Estimator, now: RepeatedWork, choice: Choice, k: int) -> tuple[Choice, RepeatedWork]:
    """The choice that makes one group more again, and its work.

    If sources of as many bytes would be held instead, such as the chunks of a product, they are made again too. The
    choice stays the same if this would run the whole early part again.
    """
    groups = estimator.sites.groups
    changed = with_group(choice, k, len(groups[k].sites))
    then = estimator.work(changed)
    if then.num_bytes >= now.num_bytes:
        added = then.held - now.held
        for j, group in enumerate(groups):
            if group.is_source and not added.isdisjoint(group.sites):
                changed = with_group(changed, j, len(group.sites))
        sources = [group for group, number in zip(groups, changed, strict=True) if group.is_source and number]
        if estimator.sites.are_streams(sources):
            return choice, now
        then = estimator.work(changed)
    return changed, then


def _best_change(
    estimator: Estimator, rates: Rates, now: RepeatedWork, choice: Choice, k: int
) -> tuple[Choice, RepeatedWork]:
    """The choice that makes one group more again, or offloads it if that costs less for each byte; and its work."""
    again, offloading = _made_again(estimator, now, choice, k), estimator.offloading
    if offloading is None or not offloading.most[k]:
        return again
    away = with_group(choice, k, -offloading.most[k])
    work = estimator.work(away)
    if work.host_bytes > offloading.memory.limit_bytes:
        return again
    return min((again, (away, work)), key=lambda change: _paid(rates, now, change[1]))


def _ratio(estimator: Estimator, rates: Rates, now: RepeatedWork, choice: Choice, k: int) -> float:
    """Estimated time for each byte that one group more frees; NEVER if it frees none."""
    return _paid(rates, now, _best_change(estimator, rates, now, choice, k)[1])


def _paid(rates: Rates, now: RepeatedWork, then: RepeatedWork) -> float:
    """Estimated time for each byte that a change frees; NEVER if it frees none."""
    freed = now.num_bytes - then.num_bytes
    return (rates.cost_ns(then) - rates.cost_ns(now)) / freed if freed > 0 else NEVER
