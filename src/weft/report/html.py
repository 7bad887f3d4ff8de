"""ReportPage: both runs as one self-contained HTML file.

Contract: the file loads nothing from the network and runs only its own script. Names of nodes, groups and clusters are
untrusted text: the template escapes what it writes, data is embedded as JSON without `<`, `>` and `&`, and the script
writes text only. A content security policy allows the script and the style by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from weft.errors import ReportError
from weft.graph.origins import fold_layers, tell_subject
from weft.plan.decision import Reason
from weft.plan.plan import Retention, save_text
from weft.prediction.memory_by_owner import OwnedMemory
from weft.quantities import duration_text, size_text
from weft.report.collective_record import CollectiveDecision, CollectiveRecord
from weft.report.report import MEMORY_COLUMNS, PassRecord, memory_rows
from weft.report.summary import SimulatedRun, Summary
from weft.simulation.timeline import CollectiveSpan
from weft.version import VERSION

PAGE = Path(__file__).with_name("page.html")
"""The template; `page.css` and `page.js` are inserted as they are."""
MAX_HIDDEN_BY = 5
NOT_IN_MARKUP = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class ReportPage:
    """The contents of the page."""

    title: str
    cluster: str
    before: SimulatedRun
    after: SimulatedRun
    summary: Summary
    witnesses: tuple[str, ...] = ()
    """The checks of the result, each with its outcome."""
    passes: tuple[PassRecord, ...] = ()
    """The passes of the run, in their order."""
    warning: str = ""
    """A sentence for the top of the page, such as that the step does not fit."""
    baseline: str = ""
    """The comparison with the step that people run today."""
    notes: tuple[str, ...] = ()
    """Sentences about the optimized step, such as on bytes that it need not send."""
    error_bars: tuple[str, ...] = ()
    """How far the simulated times and the peak may be off, and what that rests on."""
    owned: tuple[OwnedMemory, OwnedMemory] | None = None
    """The memory of both runs by owner."""
    retained: tuple[Retention, ...] = ()
    """The choices for the values that backward needs."""
    limit: str = ""
    """One sentence about their memory limit."""

    def render(self) -> str:
        """The page as text."""
        page, style, script = (
            PAGE.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".html", ".css", ".js")
        )
        template = Environment(autoescape=True, undefined=StrictUndefined).from_string(page)
        return template.render(
            title=self.title,
            cluster=self.cluster,
            version=VERSION,
            rows=self.summary.rows,
            warning=self.warning,
            why=self.after.why_slow,
            sentence=headline(self.summary),
            retained_columns=MEMORY_COLUMNS,
            retained=memory_rows(self.retained),
            limit=self.limit,
            layers=[row.row for row in self.after.exposed_layers],
            baseline=self.baseline,
            notes=self.notes,
            error_bars=self.error_bars,
            owners=_owner_rows(self.owned) if self.owned else [],
            reasons=_reasons(self.before.records),
            passes=[_pass(record) for record in self.passes],
            all_passes=duration_text(sum(record.seconds for record in self.passes) * 1e6),
            witnesses=self.witnesses,
            policy=_policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=embed(self.data()),
        )

    def save_html(self, path: str | Path) -> None:
        """Write the page."""
        save_text(path, self.render(), ReportError)

    def data(self) -> dict[str, Any]:
        """The data that the script draws: times in nanoseconds, sizes in bytes."""
        owned = self.owned or (None, None)
        names = _owner_names(self.owned) if self.owned else []
        runs = zip(("before", "after"), (self.before, self.after), owned, strict=True)
        return {"owners": names, "runs": [_run(label, run) | _owners(memory, names) for label, run, memory in runs]}


def embed(data: Any) -> Markup:
    """Data as JSON for a script element: no part of it can end the element or open a comment."""
    return Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).translate(NOT_IN_MARKUP))


def headline(summary: Summary) -> str:
    """The summary in one sentence."""
    step = summary.rows[0]
    if not step.change:
        told = f"The step takes {step.after}, as before"
    else:
        told = f"The step takes {step.after} instead of {step.before}, {step.change.lstrip('+-')} "
        told += "less" if step.better else "more"
    gap = summary.after.gap
    return f"{told}." if gap is None else f"{told}: {gap * 100:.1f} % above the proved lower bound."


def _policy(style: str, script: str) -> str:
    """Allow the page only its own style and script, by their hashes."""
    allowed = f"style-src '{digest_of_content(style)}'; script-src '{digest_of_content(script)}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def digest_of_content(content: str) -> str:
    """The hash by which a content security policy allows a style or a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _reasons(records: Iterable[CollectiveRecord]) -> list[tuple[str, str, int]]:
    """Reason, kind of reason and number of collectives, in the order in which `Reason` lists them."""
    counts = Counter(reason for record in records for reason in {outcome.reason for outcome in record.outcomes})
    return [(reason.value, _kind(reason), counts[reason]) for reason in Reason if counts[reason]]


def _kind(reason: Reason) -> str:
    return "applied" if reason is Reason.APPLIED else "refused" if reason.is_refusal else "settled"


def _pass(record: PassRecord) -> tuple[str, int, list[tuple[str, str, int]], str]:
    """Spec, number of applied rewrites, declined ones as in `_reasons`, and time."""
    declined = [(reason, _kind(Reason(reason)), count) for reason, count in record.declined.items()]
    return record.spec, record.applied, declined, duration_text(record.seconds * 1e6)


def _run(label: str, run: SimulatedRun) -> dict[str, Any]:
    timeline = run.timeline
    critical = set(timeline.critical_path)
    spans = sorted(timeline.compute, key=lambda span: span.start_ns)
    return {
        "label": label,
        "step": timeline.step_ns,
        "bound": timeline.lower_bound_ns,
        "groups": [run.group(queue) for queue in range(run.num_queues)],
        "compute": {
            "name": [span.name for span in spans],
            "start": [span.start_ns for span in spans],
            "end": [span.end_ns for span in spans],
            "critical": [int(span.op in critical) for span in spans],
        },
        "collectives": [
            _collective(span, run, critical)
            for span in sorted((*timeline.collectives, *timeline.copies), key=lambda span: span.start_ns)
        ],
        "memory": [list(point) for point in timeline.memory],
        "peak": timeline.peak_bytes,
    }


def _owner_names(owned: Iterable[OwnedMemory]) -> list[str]:
    """The owners of all runs, in the order in which the page stacks them."""
    return list(dict.fromkeys(owner for memory in owned for owner in memory.owners))


def _owner_rows(owned: tuple[OwnedMemory, OwnedMemory]) -> list[tuple[int, str, str, str]]:
    """The number of each owner, which decides its colour, its name, and its memory at both peaks."""
    before, after = (memory.at_peak for memory in owned)
    return [
        (place, owner, size_text(before.get(owner, 0)), size_text(after.get(owner, 0)))
        for place, owner in enumerate(_owner_names(owned))
    ]


def _owners(memory: OwnedMemory | None, names: list[str]) -> dict[str, Any]:
    """The bytes of each owner at the start, then for each point of the curve the changes: owner, bytes, owner, ..."""
    if memory is None:
        return {"given": [], "changes": []}
    place = [names.index(owner) for owner in memory.owners]
    given = [0] * len(names)
    for owner, num_bytes in zip(place, memory.given, strict=True):
        given[owner] = num_bytes
    changes = [[part for owner, size in change for part in (place[owner], size)] for change in memory.changes]
    return {"given": given, "changes": changes}


def _collective(span: CollectiveSpan, run: SimulatedRun, critical: set[int]) -> dict[str, Any]:
    record = run.record_of.get(span.name)
    return {
        "name": span.name,
        "of": tell_subject(record.origins) if record else "",
        "layer": ", ".join(fold_layers(origin.layer for origin in record.origins if origin.layer)) if record else "",
        "phase": record.origins[0].phase if record and record.origins else "",
        "source": record.origins[0].source if record and len(record.origins) == 1 else "",
        "queue": span.queue,
        "group": run.group(span.queue),
        "start": span.start_ns,
        "end": span.end_ns,
        "launched": span.launched_ns,
        "waited": span.waited_ns,
        "hidden": span.hidden_ns,
        "exposed": span.exposed_ns,
        "hiddenBy": list(span.hidden_by[:MAX_HIDDEN_BY]),
        "critical": int(span.op in critical),
        "kind": record.kind if record else "",
        "ranks": record.num_ranks if record else 0,
        "bytes": record.num_bytes if record else None,
        "outcomes": [_outcome(outcome) for outcome in record.outcomes] if record else [],
    }


def _outcome(outcome: CollectiveDecision) -> dict[str, Any]:
    return {
        "pass": outcome.pass_name,
        "reason": outcome.reason.value,
        "sort": _kind(outcome.reason),
        "sentence": outcome.sentence,
        "blocking": outcome.blocking,
    }
