"""The page of a report as text: what it holds, and that no name can leave its place. A browser test shows the rest."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from weft.graph.origins import CollectiveOrigin
from weft.plan.decision import Reason
from weft.prediction.memory_by_owner import OwnedMemory
from weft.report.collective_record import CollectiveDecision, CollectiveRecord
from weft.report.html import ReportPage, embed, headline
from weft.report.report import PassRecord
from weft.report.summary import SimulatedRun, summarize
from weft.simulation.timeline import CollectiveSpan, Span, Timeline

HOSTILE = "<img src=x onerror=alert(1)>\"'</script><!--\u2028\u2029&amp;{{ 7 * 7 }}"


ORIGIN = CollectiveOrigin("layers.3.up", "layers.3", "forward", "model.py:41 in forward: self.up(x)", 4096)


def run(name: str = "ag", exposed_ns: int = 500, bound_ns: int = 2000) -> SimulatedRun:
    """Two spans of compute, out of order, and a collective about which two things were decided."""
    outcomes = (
        CollectiveDecision("bucket", Reason.DEPENDENCY, f"{name} stays", (name,), "b"),
        CollectiveDecision("sink-waits", Reason.APPLIED, "it sinks", (name,), None),
    )
    collective = CollectiveSpan(2, name, 0, 1500, 1500, 0, 0, 1000, 1000, exposed_ns, tuple("abcdefg"))
    return SimulatedRun(
        Timeline(
            (Span(1, "b", 1500, 2500, 1000), Span(0, "a", 0, 1000, 1000)),
            (collective,),
            2500,
            (0, 2),
            64,
            ((0, 32), (1000, 64)),
            bound_ns,
        ),
        ("dp",),
        (CollectiveRecord(name, "all_gather", "dp", 8, 4096, outcomes, (ORIGIN,)),),
    )


def page(name: str = "ag", title: str = "a step") -> ReportPage:
    before, after = run(name), run(name)
    passes = (PassRecord(f"{name}{{max=1}}", True, 0.0012, 3, {"dependency": 7, "already-done": 5}),)
    passes += (PassRecord("sink-waits", False, 0.5, 0, {}),)
    return ReportPage(title, "h100-8", before, after, summarize(before, after), ("structure: holds",), passes)


def data_of(text: str) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_the_page_has_the_step_that_people_run_today_and_notes_as_text():
    told = replace(page(), baseline=f"baseline {HOSTILE}", notes=(f"first {HOSTILE}", "second")).render()
    texts = "".join(Tags(told).texts)
    for sentence in (f"baseline {HOSTILE}", f"note: first {HOSTILE}", "note: second"):
        assert sentence in texts
    assert "img" not in Tags(told).tags


class Tags(HTMLParser):
    """Tags and attributes of a page, and all of its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_data_of_the_page_is_what_the_timelines_say():
    text = page().render()
    before, after = data_of(text)["runs"]
    assert (before["label"], after["label"]) == ("before", "after")
    assert after["compute"] == {"name": ["a", "b"], "start": [0, 1500], "end": [1000, 2500], "critical": [1, 0]}
    assert (after["step"], after["bound"], after["peak"]) == (2500, 2000, 64)
    assert after["memory"] == [[0, 32], [1000, 64]]
    assert after["groups"] == ["dp"]
    assert after["collectives"] == [
        {
            "name": "ag",
            "of": "layers.3.up",
            "layer": "layers.3",
            "phase": "forward",
            "source": "model.py:41 in forward: self.up(x)",
            "queue": 0,
            "group": "dp",
            "start": 0,
            "end": 1500,
            "launched": 0,
            "waited": 1000,
            "hidden": 1000,
            "exposed": 500,
            "hiddenBy": list("abcde"),
            "critical": 1,
            "kind": "all_gather",
            "ranks": 8,
            "bytes": 4096,
            "outcomes": [
                {"pass": "bucket", "reason": "dependency", "sort": "refused", "sentence": "ag stays", "blocking": "b"},
                {
                    "pass": "sink-waits",
                    "reason": "applied",
                    "sort": "applied",
                    "sentence": "it sinks",
                    "blocking": None,
                },
            ],
        }
    ]


def test_the_memory_of_both_runs_is_told_by_owner():
    before = OwnedMemory(("parameters", "activations"), (32, 0), (((1, 32),),))
    after = OwnedMemory(("parameters", "gradients"), (32, 0), (((0, -8), (1, 40)),))
    text = replace(page(), owned=(before, after)).render()
    data = data_of(text)
    assert data["owners"] == ["parameters", "activations", "gradients"]
    assert [(run["given"], run["changes"]) for run in data["runs"]] == [
        ([32, 0, 0], [[1, 32]]),
        ([32, 0, 0], [[0, -8, 2, 40]]),
    ]
    texts = [text.strip() for text in Tags(text).texts if text.strip()]
    first = texts.index("Memory by owner")
    assert texts[first + 2 : first + 14] == [
        *("owner", "before", "after"),
        *("parameters", "32 B", "24 B"),
        *("activations", "32 B", "0 B"),
        *("gradients", "0 B", "40 B"),
    ]


def test_without_owners_the_page_has_no_table_of_them():
    text = page().render()
    assert data_of(text)["owners"] == []
    assert "Memory by owner" not in text


def test_the_page_begins_with_the_answer_and_has_the_exposed_time_by_layer():
    texts = [text.strip() for text in Tags(page().render()).texts if text.strip()]
    told = next(text for text in texts if text.startswith("Of the "))
    assert told.startswith("Of the 2.50 us step, compute takes 2.00 us and exposed communication 0.50 us (20.0 %)")
    assert "layers.3 in forward, 0.50 us" in told
    first = texts.index("Exposed by layer")
    assert texts.index(told) < texts.index("quantity") < first
    row = texts.index("layers.3", first)
    assert texts[row : row + 4] == ["layers.3", "forward", "1", "0.50 us"]


def test_the_headline_reasons_and_witnesses_need_no_script():
    texts = [text.strip() for text in Tags(page().render()).texts if text.strip()]
    for told in ("a step", "step", "2.50 us", "peak memory", "64 B", "1 applied", "1 dependency"):
        assert told in texts
    assert any("checked: structure: holds" in text for text in texts)
    assert any("simulated on h100-8" in text for text in texts)


def test_counts_say_whether_they_are_of_collectives_or_of_decisions():
    texts = [" ".join(text.split()) for text in Tags(page().render()).texts]
    label = texts.index("of the original graph, by decision")
    assert [text for text in texts[:label] if text][-1] == "Collectives"
    assert [text for text in texts[label:] if text][1] == "1 applied"
    assert "decisions applied" in texts
    assert "decisions declined, by reason" in texts


def test_each_pass_is_a_row_with_what_it_applied_what_it_declined_and_its_time():
    found = re.search(r'<table class="list static passes">.*?<tbody>(.*?)</tbody>', page().render(), re.DOTALL)
    assert found
    rows = [[text for text in Tags(row).texts if text.strip()] for row in found.group(1).split("</tr>")]
    assert rows == [
        ["ag{max=1}", "3", "7 dependency", "5 already-done", "1.20 ms"],
        ["sink-waits", "0", "500 ms"],
        [],
    ]
    assert "501 ms in all" in page().render()
    assert '<span class="chip refused">7 dependency</span><span class="chip settled">5 already-done</span>' in (
        found.group(1)
    )


def test_a_page_without_passes_has_no_table_of_them():
    bare = SimulatedRun(Timeline((), (), 5, ()))
    assert "Passes" not in ReportPage("", "", bare, bare, summarize(bare, bare)).render()


def test_a_hostile_name_adds_no_tag_and_no_attribute_and_arrives_whole():
    text = page(HOSTILE, title=HOSTILE).render()
    hostile, plain = Tags(text), Tags(page().render())
    assert hostile.tags == plain.tags
    assert [name for name, _ in hostile.attributes] == [name for name, _ in plain.attributes]
    assert data_of(text)["runs"][0]["collectives"][0]["name"] == HOSTILE
    assert HOSTILE in hostile.texts
    assert f"{HOSTILE}{{max=1}}" in hostile.texts


def test_embedded_data_holds_nothing_that_markup_means_and_reads_back():
    data = {"name": HOSTILE, "half": "\ud800"}
    text = str(embed(data))
    assert not re.search("[<>&\u2028\u2029\ud800]", text)
    assert json.loads(text) == data


def test_numbers_that_json_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed({"gap": float("inf")})


def test_the_page_asks_for_nothing_from_outside():
    text = page().render()
    assert not re.search(
        r"https?:|//cdn|@import|url\(|\bfetch\b|XMLHttpRequest|innerHTML|insertAdjacent|\beval\b", text
    )
    loads = {name for name, _ in Tags(text).attributes} & {"src", "href", "action", "style", "onclick", "onload"}
    assert loads == set()


def test_the_policy_allows_the_style_and_the_script_that_are_there_and_nothing_else():
    text = page(HOSTILE).render()
    policy = next(value for name, value in Tags(text).attributes if name == "content" and value and "default" in value)
    for tag in ("style", "script"):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert found
        digest = base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_the_file_is_the_page_and_half_characters_do_not_stop_it(tmp_path: Path):
    page().save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page().render()
    page(title="half \ud800").save_html(str(tmp_path / "half.html"))
    assert "<h1>half ?</h1>" in (tmp_path / "half.html").read_text(encoding="utf-8")


def test_a_run_without_records_bound_or_memory_is_shown_too():
    bare = SimulatedRun(Timeline((), (CollectiveSpan(0, "ag", 0, 5, 5, 1, 0, None, 0, 5),), 5, ()))
    shown = data_of(ReportPage("", "", bare, bare, summarize(bare, bare)).render())["runs"][1]
    assert shown["groups"] == ["queue 0", "queue 1"]
    assert (shown["collectives"][0]["bytes"], shown["collectives"][0]["outcomes"]) == (None, [])


def test_the_sentence_says_less_more_or_as_before():
    def timeline(step_ns: int, bound_ns: int) -> SimulatedRun:
        return SimulatedRun(Timeline((), (), step_ns, (), 0, (), bound_ns))

    slow, quick, bare = timeline(3_000_000, 2_000_000), timeline(2_100_000, 2_000_000), timeline(3_000_000, 0)
    bound = "above the proved lower bound."
    assert headline(summarize(slow, quick)) == f"The step takes 2.10 ms instead of 3.00 ms, 30.0 % less: 5.0 % {bound}"
    assert headline(summarize(quick, slow)) == f"The step takes 3.00 ms instead of 2.10 ms, 42.9 % more: 50.0 % {bound}"
    assert headline(summarize(slow, bare)) == "The step takes 3.00 ms, as before."
