"""Listings: the graph as text, in Python syntax, and back.

    group('dp', size=2)

    def graph(x: f32[2, 4]):
        ag0: f32[4, 4] = all_gather(x, 2, 'dp')
        w0: f32[4, 4] = wait(ag0)
        return [w0]

If the graph says how many tokens a step takes, the first line is `tokens_per_step(65536)`; digests leave it out.

Contract: `render(parse(text))` gives the text of a rendered graph back; the text is a function of the graph alone, the
same on every rank. `parse` builds the graph by look-up and never runs any part of the text.
"""

from weft.graph.listings.reader import parse
from weft.graph.listings.writer import (
    KnownLines,
    canonical_digest,
    digest,
    excerpt,
    line_of,
    render,
    source_of,
    without_values,
)

__all__ = [
    "KnownLines",
    "canonical_digest",
    "digest",
    "excerpt",
    "line_of",
    "parse",
    "render",
    "source_of",
    "without_values",
]
