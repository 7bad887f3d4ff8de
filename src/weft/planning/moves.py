"""Moves: small changes to a schedule of few jobs. Every one is legal.

A unit is put elsewhere, with all that it needs or that needs it on the way; a bucket is taken apart; two launches of
one key become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from weft.planning.execution import NEVER, Merging, Unit
from weft.planning.jobs import Jobs

SPLITS, JOINS = 0.3, 0.3
"""How often a bucket is taken apart, and a launch joined with another, where that is possible."""


class Moves:
    """Changes to orders of the jobs of one program."""

    def __init__(self, jobs: Jobs, merging: Merging | None, random: Random) -> None:
        self.jobs, self.merging, self.random = jobs, merging, random

    def changed(self, units: list[Unit]) -> list[Unit] | None:
        """The units in another order, or other units; None where what was tried is not legal."""
        i = self.random.randrange(len(units))
        unit, first = units[i], units[i][0]
        if len(unit) > 1 and self.random.random() < SPLITS:
            return [*units[:i], *((job,) for job in unit), *units[i + 1 :]]
        if self.merging is not None and self.merging.key(first) >= 0 and self.random.random() < JOINS:
            return self._joined(units, i)
        j = self.random.randrange(len(units))
        return self._pulled(units, i, j) if j < i else self._pushed(units, i, j)

    def _joined(self, units: list[Unit], i: int) -> list[Unit] | None:
        """A launch made one with another of its key, in the place of that."""
        assert self.merging is not None
        unit, rest = units[i], units[:i] + units[i + 1 :]
        key = self.merging.key(unit[0])
        others = [j for j, other in enumerate(rest) if self.merging.key(other[0]) == key]
        if not others:
            return None
        j = self.random.choice(others)
        rest[j] = tuple(sorted((*rest[j], *unit)))
        return rest if self.merging.duration(rest[j]) < NEVER and self._is_legal(rest, j) else None

    def _is_legal(self, units: list[Unit], i: int) -> bool:
        """Whether all that a unit needs is before it, and all that needs it behind."""
        jobs, place = self.jobs, {job: k for k, unit in enumerate(units) for job in unit}
        before = all(place[p] < i for job in units[i] for p in (*jobs.preds[job], *jobs.comm_preds[job]))
        return before and all(place[s] > i for job in units[i] for s in jobs.succs[job])

    def _pulled(self, units: list[Unit], i: int, j: int) -> list[Unit]:
        """Unit i put before unit j, with what it needs of those between."""
        needed = set(self._needs(units[i]))
        along, left = [units[i]], list[Unit]()
        for unit in reversed(units[j:i]):
            if needed.isdisjoint(unit):
                left.append(unit)
            else:
                along.append(unit)
                needed.update(self._needs(unit))
        return [*units[:j], *reversed(along), *reversed(left), *units[i + 1 :]]

    def _pushed(self, units: list[Unit], i: int, j: int) -> list[Unit]:
        """Unit i put behind unit j, with what needs it of those between."""
        succs, behind = self.jobs.succs, {s for job in units[i] for s in self.jobs.succs[job]}
        along, left = [units[i]], list[Unit]()
        for unit in units[i + 1 : j + 1]:
            if behind.isdisjoint(unit):
                left.append(unit)
            else:
                along.append(unit)
                behind.update(s for job in unit for s in succs[job])
        return [*units[:i], *left, *along, *units[j + 1 :]]

    def _needs(self, unit: Unit) -> list[int]:
        return [p for job in unit for p in (*self.jobs.preds[job], *self.jobs.comm_preds[job])]

    def with_waits(self, units: Sequence[Unit]) -> list[int]:
        """The events of units in order, each launch waited for before the first job that needs it."""
        jobs, events, waited = self.jobs, list[int](), set[int]()
        for unit in units:
            for launch in (launch for job in unit for launch in jobs.comm_preds[job]):
                if launch not in waited:
                    waited.add(launch)
                    events.append(~launch)
            events += unit
        return [*events, *(~job for unit in units for job in unit if jobs.queue[job] >= 0 and job not in waited)]
