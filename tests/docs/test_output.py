"""Output that pages show: it is compared with what is above it, or a test that is named here asserts its text."""

from __future__ import annotations

import pytest

from tests.docs.pages import REPOSITORY, Block, all_blocks, blocks
from tests.docs.test_programs import MADE

ASSERTED = {
    ("README.md", "llama-8b, 32 layers"): ("tests/docs/test_demo.py", "one step on"),
    ("examples/README.md", "step 0  loss"): ("tests/integration/test_examples.py", "weft: "),
    ("docs/agreement.md", "agreement: rank 0 and"): (
        "tests/unit/verification/test_rank_record.py",
        "disagree on graph",
    ),
    ("docs/agreement.md", "group('g0', size=4)"): ("tests/unit/graph/test_groups.py", "id='#1'"),
    ("docs/capture.md", "tensor('flat'"): (
        "tests/unit/graph/test_aliasing.py",
        "tensor('tail', f32[2](offset=2, base='flat'), [0.0, 0.0])",
    ),
    ("docs/planning.md", "schedule-overlap: no order"): (
        "tests/unit/cli/test_sweep.py",
        "no order was found that fits in 100 bytes; the least that one needs is 288",
    ),
    ("docs/planning.md", "all_gather_into_tensor: all_gather of"): (
        "tests/docs/test_demo.py",
        "all_gather_into_tensor",
    ),
}
"""Blocks by their page and first words: the test that asserts such a text, and words of it that are in both."""

PICTURES = {("docs/architecture.md", "your training step")}
"""Blocks that are drawings."""


def stands_alone(block: Block) -> bool:
    """Whether nothing above an output block prints it."""
    every = blocks(block.page)
    before = every[every.index(block) - 1] if every.index(block) else None
    return not (block.follows and before is not None and before.kind in ("python", "commands"))


ALONE = [b for b in all_blocks("output") if b.page != MADE and not b.not_run and stands_alone(b)]


@pytest.mark.parametrize("block", ALONE, ids=str)
def test_output_that_stands_alone_is_asserted_by_a_test(block: Block):
    first = block.text.split("\n")[0].strip()
    if any(block.page == page and first.startswith(words) for page, words in PICTURES):
        return
    named = [value for (page, words), value in ASSERTED.items() if block.page == page and first.startswith(words)]
    assert named, f"nothing prints {first!r}: put it behind what does, or name the test that asserts it"
    (test, words) = named[0]
    assert words in block.text
    assert words in (REPOSITORY / test).read_text()
