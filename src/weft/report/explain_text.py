"""An explanation as text.

ag0: all_gather of 4096 bytes over dp (8 ranks)
  + hoist-launches: ag0 is launched behind x
  = sink-waits: w0 stands before its first use, r, already (already-done: r)
  - dedupe-collectives: ag0 is ag1 again and stays: ... (mutated: add_)
"""

from __future__ import annotations

from weft.quantities import duration_text, share_text
from weft.report.explain import CollectiveRecord, Explanation, Outcome, ReasonTotal, Verdict
from weft.report.plain_text import plain_line
from weft.report.report import table


def text_of(explanation: Explanation) -> str:
    """The whole text: every collective with its decisions, and the totals."""
    lines = [line for record in explanation.collectives for line in _lines(record)]
    if not lines:
        return "the graph has no collectives"
    rows = [("reason", "collectives", "decisions", "exposed", "lifting gains at most")]
    rows += map(_total, explanation.totals)
    if explanation.unconsidered:
        rows.append(("not considered", str(len(explanation.unconsidered)), "0", "", ""))
    columns = 5 if any(total.exposed_us for total in explanation.totals) else 3
    return "\n".join([*lines, "", *table([row[:columns] for row in rows]), *_verdict(explanation.verdict)])


def _verdict(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return []
    step, bound = duration_text(verdict.step_us), duration_text(verdict.bound_us)
    graph = "graph as it was" if verdict.bound_of == "before" else "rewritten graph, which has less work"
    above = f"{share_text(verdict.gap)} above the bound of {bound} for the {graph}"
    told = f"the step takes {step} on {verdict.cluster}, {above}"
    return ["", plain_line(told), plain_line(f"the bound is proved by {verdict.bound}")]


def _total(total: ReasonTotal) -> tuple[str, str, str, str, str]:
    exposed, gain = (duration_text(us) if total.exposed_us else "" for us in (total.exposed_us, total.gain_us))
    return total.reason.value, str(total.num_collectives), str(total.num_decisions), exposed, gain


def _lines(record: CollectiveRecord) -> list[str]:
    size = "of unknown size" if record.num_bytes is None else f"of {record.num_bytes} bytes"
    ranks = f"{record.num_ranks} ranks" if record.num_ranks else "unknown ranks"
    head = f"{record.name}: {record.kind} {size} over {record.group} ({ranks})"
    outcomes = [f"  {_line(outcome)}" for outcome in record.outcomes] or ["  no pass has considered it"]
    return [plain_line(line) for line in [head, *outcomes]]


def _line(outcome: Outcome) -> str:
    sign = "+" if outcome.applied else "-" if outcome.reason.is_refusal else "="
    told = f"{sign} {outcome.pass_name}: {outcome.sentence}"
    if outcome.applied:
        return told
    return f"{told} ({outcome.reason.value}{f': {outcome.blocking}' if outcome.blocking else ''})"
