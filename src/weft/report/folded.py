"""The collectives of a whole model on one screen: alike layers are folded.

    layers.0-31, forward: 288 all-gathers over dp (8 ranks), 13.0 GiB: attention.query, attention.key and 7 more
      + schedule-overlap: 64 decisions, such as: 4 launches of group 'dp' are merged: ...
      - dedupe-collectives: 225 decisions (holds-memory), such as: ...

Decisions are one line if they differ only in names and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.graph.origins import fold_layers
from weft.quantities import size_text
from weft.report.collective_record import CollectiveDecision, CollectiveRecord
from weft.report.plain_text import WORD, plain_line, with_modules

MAX_SUBJECTS = 4
"""Maximum number of parameters or modules that a line names."""
MAX_DECISIONS = 4
"""Maximum number of lines with decisions for each line with collectives."""
_NUMBERS = re.compile(r"'[^']*'|\w*\d[\w.]*( ([kMG]i?)?B\b| [mu]?s\b)?")
"""Parts of a sentence that differ between alike decisions: quoted texts, numbers, and names with numbers."""


@dataclass
class _Family:
    """Collectives of the same kind, group and phase, in alike layers or outside of all layers."""

    records: list[CollectiveRecord] = field(default_factory=list[CollectiveRecord])

    def lines(self, modules: Mapping[str, str], max_decisions: int) -> list[str]:
        alike: dict[tuple[str, str, str], dict[CollectiveDecision, None]] = {}
        for outcome in (outcome for record in self.records for outcome in record.outcomes):
            sentence = WORD.sub(lambda found: "" if found[0] in modules else found[0], outcome.sentence)
            key = (outcome.pass_name, outcome.reason, _NUMBERS.sub("", sentence))
            alike.setdefault(key, {})[outcome] = None
        ordered = sorted(alike.values(), key=lambda each: (-sum(d.exposed_us for d in each), -len(each)))
        lines = [self._head(), *(f"  {_tell(list(each), modules)}" for each in ordered[:max_decisions])]
        rest = sum(map(len, ordered[max_decisions:]))
        lines += [f"  ... and {rest} more decision{'s' if rest > 1 else ''}"] if rest and max_decisions else []
        lines += [] if alike else ["  no pass has considered them"]
        return [plain_line(line) for line in lines]

    def _head(self) -> str:
        first = self.records[0]
        origins = [origin for record in self.records for origin in record.origins]
        where = ", ".join(filter(None, (*fold_layers(o.layer for o in origins if o.layer), origins[0].phase)))
        subjects = list(dict.fromkeys(o.subject.removeprefix(f"{o.layer}.") for o in origins if o.subject != o.layer))
        named = ", ".join(subjects[:MAX_SUBJECTS])
        named += f" and {len(subjects) - MAX_SUBJECTS} more" if len(subjects) > MAX_SUBJECTS else ""
        sizes = [record.num_bytes for record in self.records]
        size = "unknown size" if None in sizes else size_text(sum(size or 0 for size in sizes))
        ranks = f"{first.num_ranks} ranks" if first.num_ranks else "unknown ranks"
        what = f"{len(self.records)} {first.kind.replace('_', '-')}{'s' if len(self.records) > 1 else ''}"
        told = f"{where or 'outside of modules'}: {what} over {first.group} ({ranks}), {size}"
        return f"{told}: {named}" if named else told


def folded_lines(records: Sequence[CollectiveRecord], modules: Mapping[str, str], max_lines: int) -> list[str]:
    """All collectives in at most `max_lines` lines: with fewer decisions, and then fewer collectives, if need be."""
    families: dict[tuple[str, ...], _Family] = {}
    for record in records:
        origin = record.origins[0]
        prefix, _, number = origin.layer.rpartition(".")
        in_layers = number.isdigit()
        key = ("layers" if in_layers else "", prefix if in_layers else "", origin.phase, record.kind, record.group)
        families.setdefault(key, _Family()).records.append(record)
    lines: list[str] = []
    for max_decisions in range(MAX_DECISIONS, -1, -1):
        lines = [line for each in families.values() for line in each.lines(modules, max_decisions)]
        if len(lines) <= max_lines:
            return lines
    return [*lines[: max_lines - 1], f"... and {len(lines) - max_lines + 1} more lines"]


def _tell(alike: Sequence[CollectiveDecision], modules: Mapping[str, str]) -> str:
    longest = max(alike, key=lambda decision: decision.exposed_us)
    if len(alike) == 1:
        return with_modules(str(longest), modules)
    sign, _, _ = str(longest).partition(" ")
    reason = "" if longest.applied else f" ({longest.reason.value})"
    sentence = with_modules(longest.sentence, modules)
    return f"{sign} {longest.pass_name}: {len(alike)} decisions{reason}, such as: {sentence}"
