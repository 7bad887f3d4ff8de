"""The caching allocator: rounding, pages, best fit, merging, and pools that do not share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.prediction.caching_allocator import CachingAllocator, rounded

MIB = 1 << 20


def test_a_block_is_rounded_to_512_bytes():
    assert [rounded(size) for size in (1, 512, 513)] == [512, 512, 1024]


def test_small_and_large_blocks_grow_by_pages_of_their_own():
    allocator = CachingAllocator()
    allocator.allocate("small", 100, "default")
    assert allocator.reserved_bytes() == {"default": 2 * MIB}
    allocator.allocate("large", 3 * MIB, "default")
    assert allocator.reserved_bytes() == {"default": 22 * MIB}


def test_freed_memory_is_used_again_by_the_same_stream_only():
    allocator = CachingAllocator()
    allocator.allocate("a", 20 * MIB, "default")
    allocator.free("a")
    allocator.allocate("b", 20 * MIB, "default")
    assert allocator.reserved_bytes() == {"default": 20 * MIB}
    allocator.free("b")
    allocator.allocate("c", 20 * MIB, "other")
    assert allocator.reserved_bytes() == {"default": 20 * MIB, "other": 20 * MIB}


def test_a_hole_that_is_too_small_is_left_and_neighbours_merge():
    allocator = CachingAllocator()
    for name in "abc":
        allocator.allocate(name, 20 * MIB, "default")
    allocator.free("b")
    allocator.allocate("large", 40 * MIB, "default")
    assert allocator.reserved_bytes() == {"default": 100 * MIB}
    allocator.free("a")  # with the hole of b: 40 MiB at the start
    allocator.allocate("again", 40 * MIB, "default")
    assert allocator.reserved_bytes() == {"default": 100 * MIB}


def test_a_segment_grows_by_what_its_free_end_lacks():
    allocator = CachingAllocator()
    allocator.allocate("a", 5 * MIB, "default")
    allocator.allocate("b", 30 * MIB, "default")
    assert allocator.reserved_bytes() == {"default": 40 * MIB}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 64 * MIB)), max_size=60))
def test_reserved_memory_holds_every_live_block(steps: list[tuple[int, int]]):
    allocator, live, peak, largest = CachingAllocator(), dict[int, int](), 0, 0
    for key, size in steps:
        if key in live:
            allocator.free(key)
            del live[key]
        else:
            allocator.allocate(key, size, "default")
            live[key] = rounded(size)
            largest = max(largest, size)
        peak = max(peak, sum(live.values()))
        reserved = sum(allocator.reserved_bytes().values())
        assert peak <= reserved
    for key in live:
        allocator.free(key)
    reserved = sum(allocator.reserved_bytes().values())
    if largest > MIB:  # everything is free and merged, so the largest block fits again without growth
        allocator.allocate("again", largest, "default")
        assert sum(allocator.reserved_bytes().values()) == reserved
