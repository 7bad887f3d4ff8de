"""The simulator agrees with timelines that were computed by hand, one for each rule of the execution model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden.timelines.timelines import Section, program_of_section, read_op, sections, tell
from weft.simulation.simulator import simulate

SECTIONS = sections()


@pytest.mark.parametrize("section", SECTIONS, ids=[section.id for section in SECTIONS])
def test_a_timeline_is_as_computed_by_hand(section: Section, tmp_path: Path):
    made = program_of_section(section, tmp_path)
    (text,) = section.block("timeline")
    expected = {line.split()[0]: line.split(" ", 1)[1].strip() for line in text.splitlines()}
    found = tell(made, simulate(made))
    if "critical" not in expected:
        del found["critical"]
    assert found == expected


def test_every_section_has_its_arithmetic_and_its_own_title():
    assert len(SECTIONS) > 25
    assert [section.id for section in SECTIONS if not re.search(r"\d", section.arithmetic)] == []
    assert len({section.id for section in SECTIONS}) == len(SECTIONS)


@pytest.mark.parametrize("line", ["compute a", "launch g 30 dp", "sleep a 10", "wait"])
def test_what_is_no_operation_is_refused(line: str):
    with pytest.raises(ValueError, match=f"{line!r} is no operation"):
        read_op(line)
