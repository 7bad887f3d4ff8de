"""Local moves: small legal changes to a schedule of few jobs.

There are three moves: move a unit, together with the units in between that it needs or that need it; take one launch
out of a bucket; merge two launches of one key.
"""

from __future__ import annotations

from random import Random

from weft.scheduling.jobs import Jobs
from weft.scheduling.scheduler import NEVER, Merging, Unit

SPLITS, JOINS = 0.3, 0.3
"""Probability of splitting a chosen bucket, and of merging a chosen launch with another."""


def with_waits(jobs: Jobs) -> list[Unit]:
    """The jobs in their own order, each launch waited for before its first consumer, or at the end."""
    units, waited = list[Unit](), set[int]()
    for job in range(len(jobs)):
        for launch in jobs.comm_preds[job]:
            if launch not in waited:
                waited.add(launch)
                units.append((~launch,))
        units.append((job,))
    return [*units, *((~job,) for job in range(len(jobs)) if jobs.queue[job] >= 0 and job not in waited)]


MOST_LATENCIES = 100
"""Longest merged collective, in latencies; beyond that, merging saves next to nothing."""


class Moves:
    """Changes to orders of the jobs of one program."""

    def __init__(self, jobs: Jobs, merging: Merging | None, random: Random) -> None:
        self.jobs, self.merging, self.random = jobs, merging, random
        self.needs: dict[int, list[int]] = {}
        """Predecessors of each event: for a job its jobs and waits, for a wait its launch."""
        self.followers: dict[int, list[int]] = {}
        for job in range(len(jobs)):
            self.needs[job] = [*jobs.preds[job], *(~launch for launch in jobs.comm_preds[job])]
            if jobs.queue[job] >= 0:
                self.needs[~job] = [job]
        for event, needed in self.needs.items():
            for other in needed:
                self.followers.setdefault(other, []).append(event)

    def changed(self, units: list[Unit]) -> list[Unit] | None:
        """The units after one random move; None if the move is not legal."""
        i = self.random.randrange(len(units))
        unit, first = units[i], units[i][0]
        if len(unit) > 1 and self.random.random() < SPLITS:
            alone = self.random.choice(unit)
            rest = tuple(job for job in unit if job != alone)
            return [*units[:i], rest, (alone,), *units[i + 1 :]]
        if first >= 0 and self._key(first) >= 0 and self.random.random() < JOINS:
            return self._joined(units, i)
        j = self.random.randrange(len(units))
        return self._pulled(units, i, j) if j < i else self._pushed(units, i, j)

    def _key(self, event: int) -> int:
        return self.merging.key(event) if self.merging is not None and event >= 0 else -1

    def _joined(self, units: list[Unit], i: int) -> list[Unit] | None:
        """A launch merged with another one of its key, at the position of the other."""
        unit, rest = units[i], units[:i] + units[i + 1 :]
        key = self._key(unit[0])
        others = [j for j, other in enumerate(rest) if self._key(other[0]) == key]
        if not others or self.merging is None:
            return None
        j = self.random.choice(others)
        rest[j] = tuple(sorted((*rest[j], *unit)))
        longest = min(NEVER - 1, MOST_LATENCIES * self.merging.latency(rest[j][0]))
        return rest if self.merging.duration(rest[j]) <= longest and self._is_legal(rest, j) else None

    def _is_legal(self, units: list[Unit], i: int) -> bool:
        """Whether everything that a unit needs is before it, and everything that needs it after it."""
        place = {event: k for k, unit in enumerate(units) for event in unit}
        before = all(place[other] < i for event in units[i] for other in self.needs[event])
        return before and all(place[other] > i for event in units[i] for other in self.followers.get(event, ()))

    def _pulled(self, units: list[Unit], i: int, j: int) -> list[Unit]:
        """Unit i moved before unit j, with the units in between that it needs."""
        along, left, needed = [units[i]], list[Unit](), self._around(units[i], self.needs)
        for unit in reversed(units[j:i]):
            if needed.isdisjoint(unit):
                left.append(unit)
            else:
                along.append(unit)
                needed |= self._around(unit, self.needs)
        return [*units[:j], *reversed(along), *reversed(left), *units[i + 1 :]]

    def _pushed(self, units: list[Unit], i: int, j: int) -> list[Unit]:
        """Unit i moved after unit j, with the units in between that need it."""
        along, left, after = [units[i]], list[Unit](), self._around(units[i], self.followers)
        for unit in units[i + 1 : j + 1]:
            if after.isdisjoint(unit):
                left.append(unit)
            else:
                along.append(unit)
                after |= self._around(unit, self.followers)
        return [*units[:i], *left, *along, *units[j + 1 :]]

    def _around(self, unit: Unit, neighbours: dict[int, list[int]]) -> set[int]:
        return {other for event in unit for other in neighbours.get(event, ())}
