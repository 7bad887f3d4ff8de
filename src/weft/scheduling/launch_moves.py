"""Launch moves: small legal changes to the launches of a schedule of many jobs.

Most jobs of a large program are where they should be. The length of the step depends on a few launches: those of its
first gathers and of its last reductions, and those that a job waits for. There are four moves: move a launch; split a
bucket; merge it with the one before or after it that has the same key; hand some of its members over to that one.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.scheduling.local_moves import Moves
from weft.scheduling.scheduler import Unit

FOCUS = 0.5
"""Probability of choosing an exposed launch, or one beside it in the schedule."""
MOVED, SPLIT, SHIFTED = 0.2, 0.1, 0.3
"""Probabilities of these moves; the rest merges buckets. With these and FOCUS, four steps of llama-1b with AdamW were
the shortest, as a mean over four seeds (2026-11-19); other values were less than 0.2 % longer."""
FARTHEST = 7
"""A launch moves by less than two to the power of this many entries of the schedule."""
MOST_HANDED = 6
"""A bucket hands over less than two to the power of this many members."""


class LaunchMoves(Moves):
    """Changes to the launches of one program."""

    def changed_launch(self, units: list[Unit], exposed: Mapping[int, int]) -> list[Unit] | None:
        """The units after one random move of a launch; None if the move is not legal.

        `exposed` holds the exposed time of launches, by job.
        """
        random, launches = self.random, [i for i, unit in enumerate(units) if self._is_launch(unit)]
        if not launches:
            return None
        i = self._hot(units, launches, exposed) if random.random() < FOCUS else random.choice(launches)
        unit, key, move = units[i], self._key(units[i][0]), random.random()
        if move < MOVED or key < 0:
            return self._moved(units, i)
        if move < MOVED + SPLIT:
            return self._split(units, i, random.randrange(1, len(unit))) if len(unit) > 1 else None
        alike = [k for k in launches if self._key(units[k][0]) == key]
        is_later = random.random() < 0.5
        place = alike.index(i) + (1 if is_later else -1)
        if not 0 <= place < len(alike):
            return None
        if move < MOVED + SPLIT + SHIFTED and len(unit) > 1:
            handed = min(2 ** random.randrange(MOST_HANDED), len(unit) - 1)
            if is_later:
                return self._merged(self._split(units, i, len(unit) - handed), i + 1, alike[place] + 1, False)
            return self._merged(self._split(units, i, handed), alike[place], i, True)
        first, last = sorted((i, alike[place]))
        return self._merged(units, first, last, random.random() < 0.5)

    def _is_launch(self, unit: Unit) -> bool:
        return unit[0] >= 0 and self.jobs.queue[unit[0]] >= 0

    def _hot(self, units: list[Unit], launches: list[int], exposed: Mapping[int, int]) -> int:
        """An exposed launch, or one beside it; the longer a launch is exposed, the more likely."""
        weights = [sum([exposed.get(job, 0) for job in units[i]]) for i in launches]
        if not any(weights):
            return self.random.choice(launches)
        place = self.random.choices(range(len(launches)), weights)[0] + self.random.choice((-1, 0, 0, 1))
        return launches[min(max(place, 0), len(launches) - 1)]

    def _moved(self, units: list[Unit], i: int) -> list[Unit] | None:
        by = int(2 ** self.random.uniform(0, FARTHEST)) * self.random.choice((-1, 1))
        j = min(max(i + by, 0), len(units) - 1)
        if i == j:
            return None
        return self._pulled(units, i, j) if j < i else self._pushed(units, i, j)

    def _split(self, units: list[Unit], i: int, at: int) -> list[Unit]:
        """A bucket as two launches, one right after the other."""
        members = sorted(units[i])
        return [*units[:i], tuple(members[:at]), tuple(members[at:]), *units[i + 1 :]]

    def _merged(self, units: list[Unit], first: int, last: int, is_early: bool) -> list[Unit] | None:
        """Two launches as one bucket at the place of the first or of the last, with what has to move along."""
        bucket = tuple(sorted((*units[first], *units[last])))
        if is_early:
            merged = [*units[:first], *units[first + 1 : last], bucket, *units[last + 1 :]]
            merged = self._pulled(merged, last - 1, first)
        else:
            merged = [*units[:first], bucket, *units[first + 1 : last], *units[last + 1 :]]
            merged = self._pushed(merged, first, last - 1)
        return merged if self._is_legal(merged, merged.index(bucket)) else None
