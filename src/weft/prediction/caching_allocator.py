"""CachingAllocator: how much memory torch reserves for a sequence of allocations, with expandable segments.

Facts, from c10/cuda/CUDACachingAllocator.cpp: a block has a multiple of 512 bytes. Each stream has two pools, one for
blocks up to 1 MiB and one for larger ones. A pool is one segment that grows by pages of 2 MiB or 20 MiB and never
shrinks during a step. An allocation takes the smallest free block that is large enough, and leaves the rest of it free;
free neighbours merge. A freed block returns to the pool of the stream that allocated it, so no stream can use what
another one has freed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
"""Largest block of the small pool."""
PAGE_BYTES = {True: 2 << 20, False: 20 << 20}
"""Growth of a segment of small blocks, and of one of large blocks."""


def rounded(num_bytes: int) -> int:
    """The size of the block that holds an allocation."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class CachingAllocator:
    """The segments of all streams."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, bool], _Segment] = {}
        self._blocks: dict[Hashable, tuple[_Segment, int, int]] = {}

    def allocate(self, key: Hashable, num_bytes: int, stream: str) -> None:
        """Take a block under a key that no live block has."""
        size = rounded(num_bytes)
        is_small = size <= SMALL_BYTES
        segment = self._segments.setdefault((stream, is_small), _Segment(PAGE_BYTES[is_small]))
        self._blocks[key] = segment, segment.take(size), size

    def free(self, key: Hashable) -> None:
        """Return a block to its segment."""
        segment, start, size = self._blocks.pop(key)
        segment.give_back(start, size)

    def reserved_bytes(self) -> dict[str, int]:
        """Bytes that each stream has reserved."""
        found: dict[str, int] = {}
        for (stream, _), segment in self._segments.items():
            found[stream] = found.get(stream, 0) + segment.end
        return found


class _Segment:
    """Memory that grows at its end; its free blocks never touch each other."""

    def __init__(self, page_bytes: int) -> None:
        self.end = 0
        self._page_bytes = page_bytes
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}

    def take(self, size: int) -> int:
        """The start of a block of this size."""
        k = bisect_left(self._by_size, (size, 0))
        if k < len(self._by_size):
            found, start = self._by_size[k]
        else:
            start = self._start_of_end.get(self.end, self.end)
            found = self._size_at.get(start, 0)
        if found:
            self._remove(start)
        if found < size:
            grown = -(-(size - found) // self._page_bytes) * self._page_bytes
            self.end += grown
            found += grown
        self._add(start + size, found - size)
        return start

    def give_back(self, start: int, size: int) -> None:
        """Free a block, and merge it with its free neighbours."""
        after = self._size_at.get(start + size)
        if after is not None:
            self._remove(start + size)
            size += after
        before = self._start_of_end.get(start)
        if before is not None:
            size += self._size_at[before]
            self._remove(before)
            start = before
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        if size:
            insort(self._by_size, (size, start))
            self._size_at[start] = size
            self._start_of_end[start + size] = start

    def _remove(self, start: int) -> None:
        size = self._size_at.pop(start)
        del self._start_of_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
