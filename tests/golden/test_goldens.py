"""The runner of the golden files: what it reads, what it finds wrong, and what it rewrites."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.goldens import CHECKS, GoldenError, check, read, run, sections, update

BEFORE = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    a: f32[4, 4] = mm(x, x)
    return [a, w]
"""
AFTER = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    a: f32[4, 4] = mm(x, x)
    w: f32[4, 4] = wait(ag)
    return [a, w]
"""


def document(*blocks: tuple[str, str], title: str = "sink-waits", line: str = "") -> str:
    fenced = "\n".join(f"```{name}\n{text}```\n" for name, text in blocks)
    return f"# {title}\n\n## a wait sinks\n\n{line}{fenced}"


def written(folder: Path, text: str) -> Path:
    path = folder / "sink-waits.md"
    path.write_text(text)
    return path


def fault(path: Path) -> str:
    (section,) = read(path)
    with pytest.raises(GoldenError) as error:
        check(section)
    return str(error.value)


def test_every_section_of_every_file_is_listed_for_other_tests():
    found = sections()
    assert {section.path.stem for section in found} >= {"hoist-launches", "sink-waits", "dedupe-collectives"}
    assert len({section.id for section in found}) == len(found)
    assert all(section.num_ranks in (1, 2, 3, 4) for section in found)


def test_a_section_that_cannot_run_is_compared_by_its_listings_only(tmp_path: Path):
    text = AFTER.replace("mm(x, x)", "higher_order.triton_kernel_wrapper_functional(kernel_idx=0, kwargs={})")
    assert fault(written(tmp_path, document(("before", text)))).startswith("the graphs do not run:\n")
    (section,) = read(written(tmp_path, document(("before", text), line="Not run: there is no kernel.\n\n")))
    assert not section.is_run
    check(section)


def test_a_section_that_says_what_happens_passes(tmp_path: Path):
    (section,) = read(written(tmp_path, document(("before", BEFORE), ("after", AFTER))))
    check(section)
    assert (section.title, section.spec, section.line) == ("a wait sinks", "sink-waits", 2)


def test_a_line_below_the_heading_names_another_pass(tmp_path: Path):
    (section,) = read(written(tmp_path, document(("before", BEFORE), line="Pass: hoist-launches\n\n")))
    assert section.spec == "hoist-launches"
    check(section)


def test_a_listing_that_differs_is_shown_as_a_diff(tmp_path: Path):
    message = fault(written(tmp_path, document(("before", BEFORE))))
    assert message.startswith("the listing behind the pass differs\n--- expected\n+++ found\n")
    assert "+    a: f32[4, 4] = mm(x, x)\n" in message


def test_a_listing_in_another_layout_is_refused(tmp_path: Path):
    loose = BEFORE.replace("ag: f32[4, 4] =", "ag =")
    message = fault(written(tmp_path, document(("before", loose), ("after", AFTER))))
    assert message.startswith("`before` is not written as a listing is\n")


def test_names_that_a_new_call_has_lost_are_missed(monkeypatch: pytest.MonkeyPatch):
    section = next(section for section in sections() if section.path.stem == "fuse-addmms" and section.after)
    check(section)
    monkeypatch.setattr("weft.graph.edit.PROVENANCE", ("stack_trace",))
    with pytest.raises(GoldenError, match="has lost the names of"):
        check(section)


def test_a_refusal_that_is_not_there_is_missed(tmp_path: Path):
    text = document(("before", BEFORE), ("after", AFTER), ("declined", "escapes: w stays\n"))
    assert fault(written(tmp_path, text)).startswith("what is declined differs\n")


def test_an_error_that_does_not_come_is_missed(tmp_path: Path):
    text = document(("before", BEFORE), ("error", "graph: no\n"))
    assert fault(written(tmp_path, text)).startswith("the error differs\n")


def test_update_rewrites_the_blocks_in_place(tmp_path: Path):
    loose = BEFORE.replace("ag: f32[4, 4] =", "ag =")
    prose = "Some words.\n\n"
    text = document(("before", loose), ("declined", "escapes: no\n"), ("error", "graph: no\n"), line=prose)
    path = written(tmp_path, text + "\nMore words.\n\n## another one\n\n```before\n" + AFTER + "```\n")
    first, second = read(path)
    check(update(first))
    check(update(second))
    expected = document(("before", BEFORE), ("after", AFTER), line=prose)
    assert path.read_text() == expected + "\nMore words.\n\n## another one\n\n```before\n" + AFTER + "```\n"


def test_update_writes_an_error(tmp_path: Path):
    invalid = BEFORE.replace("    w: f32[4, 4] = wait(ag)\n", "").replace("[a, w]", "[a]")
    path = written(tmp_path, document(("before", invalid), title=CHECKS))
    (section,) = read(path)
    assert update(section).error == (
        "graph: ag is never waited for and is not an output of the graph\n"
        "    ag: f32[4, 4] = all_gather(p, 2, 'dp')\n"
        "    ^^\n"
        "wait for it, return it, or delete the launch\n"
    )


def test_peers_are_those_of_rank_0_and_go_round_with_the_rank(tmp_path: Path):
    listing = """group('dp', size=4)

def graph(x: f32[2], y: f32[2]):
    s: f32[0] = send(x, 1, 0, 'dp')
    got: f32[2] = recv(y, 3, 0, 'dp')
    ws: f32[0] = wait(s)
    w: f32[2] = wait(got)
    return [w]
"""
    (section,) = read(written(tmp_path, document(("before", listing))))
    modules = section.modules(section.before)
    peers = [[node.args[1] for node in module.graph.nodes if len(node.args) == 4] for module in modules]
    assert peers == [[1, 3], [2, 0], [3, 1], [0, 2]]
    check(section)


def test_sizes_without_a_hint_get_inputs(tmp_path: Path):
    listing = "group('dp', size=2)\nsymbol('u0')\n\ndef graph(x: f32[u0]):\n    return [x]\n"
    (section,) = read(written(tmp_path, document(("before", listing))))
    assert [tuple(value.shape) for (value,) in section.inputs()] == [(2,), (2,)]
    assert run(section).before == listing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no title\n", "sink-waits.md: the first line is no title such as `# hoist-launches`"),
        ("# sink-waits\n\n## empty\n", "sink-waits.md:3: 'empty' has no block `before`"),
        ("# sink-waits\n\n## one\n\n```before\n", "sink-waits.md:5: this block has no end"),
        (
            document(("before", BEFORE), ("then", AFTER)),
            "sink-waits.md:15: block 'then' is none of before, after, declined, error",
        ),
        (
            document(("before", BEFORE), ("before", BEFORE)),
            "sink-waits.md:15: block 'before' occurs twice in its section",
        ),
        (
            "# sink-waits\n" + f"\n## twice\n\n```before\n{BEFORE}```\n" * 2,
            "sink-waits.md: two sections are called 'twice'",
        ),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(GoldenError) as error:
        read(written(tmp_path, text))
    assert str(error.value) == message
