"""The symbolic witness: what it proves of buckets, and what it must never prove."""

import operator

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from tests.unit.conftest import fake_mesh
from tests.versions import needs_transfers
from weft.verification.symbolic.equivalence import Proof, prove

HEADER = "group('dp', size=2)\ngroup('tp', size=2, stride=2)\n\n"

BUCKETS: dict[str, tuple[str, str]] = {
    "all-reduces": (
        """
def graph(x: f32[2, 4], y: f32[6], z: f32[3, 2]):
    a = all_reduce(x, 'sum', 'dp')
    b = all_reduce(y, 'sum', 'dp')
    c = all_reduce(z, 'sum', 'dp')
    wa = wait(a)
    wb = wait(b)
    wc = wait(c)
    return [wa, wb, wc]
""",
        """
def graph(x: f32[2, 4], y: f32[6], z: f32[3, 2]):
    fx = view(x, [8])
    fz = view(z, [6])
    bucket = cat([fx, y, fz])
    r = all_reduce(bucket, 'sum', 'dp')
    w = wait(r)
    parts = split_with_sizes(w, [8, 6, 6])
    pa = parts[0]
    wb = parts[1]
    pc = parts[2]
    wa = view(pa, [2, 4])
    wc = view(pc, [3, 2])
    return [wa, wb, wc]
""",
    ),
    "all-gathers": (
        """
def graph(x: f32[2, 4], y: f32[3, 4], z: f32[12]):
    a = all_gather(x, 2, 'dp')
    b = all_gather(y, 2, 'dp')
    c = all_gather(z, 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    wc = wait(c)
    return [wa, wb, wc]
""",
        """
def graph(x: f32[2, 4], y: f32[3, 4], z: f32[12]):
    fx = view(x, [8])
    fy = view(y, [12])
    bucket = cat([fx, fy, z])
    r = all_gather(bucket, 2, 'dp')
    w = wait(r)
    rows = view(w, [2, 32])
    parts = split_with_sizes(rows, [8, 12, 12], 1)
    pa = parts[0]
    pb = parts[1]
    pc = parts[2]
    wa = reshape(pa, [4, 4])
    wb = reshape(pb, [6, 4])
    wc = reshape(pc, [24])
    return [wa, wb, wc]
""",
    ),
    "reduce-scatters": (
        """
def graph(x: f32[4, 4], y: f32[6, 2], z: f32[6, 2]):
    a = reduce_scatter(x, 'avg', 2, 'dp')
    b = reduce_scatter(y, 'avg', 2, 'dp')
    c = reduce_scatter(z, 'avg', 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    wc = wait(c)
    return [wa, wb, wc]
""",
        """
def graph(x: f32[4, 4], y: f32[6, 2], z: f32[6, 2]):
    rx = view(x, [2, 8])
    ry = view(y, [2, 6])
    rz = view(z, [2, 6])
    rows = cat([rx, ry, rz], 1)
    bucket = view(rows, [40])
    r = reduce_scatter(bucket, 'avg', 2, 'dp')
    w = wait(r)
    parts = split_with_sizes(w, [8, 6, 6])
    pa = parts[0]
    pb = parts[1]
    pc = parts[2]
    wa = view(pa, [2, 4])
    wb = view(pb, [3, 2])
    wc = view(pc, [3, 2])
    return [wa, wb, wc]
""",
    ),
    "all-to-alls": (
        """
def graph(x: f32[4, 4], y: f32[6, 2]):
    a = all_to_all(x, [2, 2], [2, 2], 'dp')
    b = all_to_all(y, [3, 3], [3, 3], 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[4, 4], y: f32[6, 2]):
    rx = view(x, [2, 8])
    ry = view(y, [2, 6])
    rows = cat([rx, ry], 1)
    r = all_to_all(rows, [1, 1], [1, 1], 'dp')
    w = wait(r)
    parts = split_with_sizes(w, [8, 6], 1)
    pa = parts[0]
    pb = parts[1]
    wa = reshape(pa, [4, 4])
    wb = reshape(pb, [6, 2])
    return [wa, wb]
""",
    ),
    "broadcasts": (
        """
def graph(x: f32[2, 4], y: f32[8]):
    a = broadcast(x, 1, 'dp')
    b = broadcast(y, 1, 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[2, 4], y: f32[8]):
    fx = view(x, [8])
    bucket = cat([fx, y])
    r = broadcast(bucket, 1, 'dp')
    w = wait(r)
    fa = slice(w, 0, 0, 8)
    wb = slice(w, 0, 8, 16)
    wa = view(fa, [2, 4])
    return [wa, wb]
""",
    ),
    "coalesced": (
        """
def graph(x: f32[2, 4], y: f32[8]):
    a = all_reduce(x, 'max', 'dp')
    b = all_reduce(y, 'max', 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[2, 4], y: f32[8]):
    both = all_reduce_coalesced([x, y], 'max', 'dp')
    a = both[0]
    b = both[1]
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
    ),
    "gathers with a folded cast": (
        """
def graph(x: f32[4], y: f32[4]):
    bx = _to_copy(x, dtype=bf16)
    by = _to_copy(y, dtype=bf16)
    a = all_gather(bx, 2, 'dp')
    b = all_gather(by, 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[4], y: f32[4]):
    both = cat([x, y])
    cast = _to_copy(both, dtype=bf16)
    r = all_gather(cast, 2, 'dp')
    w = wait(r)
    rows = view(w, [2, 8])
    sa = slice(rows, 1, 0, 4)
    sb = slice(rows, 1, 4, 8)
    wa = reshape(sa, [8])
    wb = reshape(sb, [8])
    return [wa, wb]
""",
    ),
    "gradients with a folded division": (
        """
def graph(x: f32[4, 2], y: f32[6]):
    dx = div(x, 2)
    dy = div(y, 2)
    a = all_reduce(dx, 'sum', 'dp')
    b = all_reduce(dy, 'sum', 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[4, 2], y: f32[6]):
    fx = view(x, [8])
    both = cat([fx, y])
    scaled = div(both, 2.0)
    r = all_reduce(scaled, 'sum', 'dp')
    w = wait(r)
    fa = slice(w, 0, 0, 8)
    wb = slice(w, 0, 8, 14)
    wa = view(fa, [4, 2])
    return [wa, wb]
""",
    ),
    "gathers of two dtypes packed by bytes": (
        """
def graph(x: f32[4], y: bf16[6]):
    a = all_gather(x, 2, 'dp')
    b = all_gather(y, 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[4], y: bf16[6]):
    bx = view.dtype(x, u8)
    by = view.dtype(y, u8)
    bucket = cat([bx, by])
    r = all_gather(bucket, 2, 'dp')
    w = wait(r)
    rows = view(w, [2, 28])
    sa = slice(rows, 1, 0, 16)
    sb = slice(rows, 1, 16, 28)
    ca = reshape(sa, [32])
    cb = reshape(sb, [24])
    wa = view.dtype(ca, f32)
    wb = view.dtype(cb, bf16)
    return [wa, wb]
""",
    ),
    "exchanges of two dtypes packed by bytes": (
        """
def graph(x: f32[4], y: bf16[8]):
    a = all_to_all(x, [2, 2], [2, 2], 'dp')
    b = all_to_all(y, [4, 4], [4, 4], 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[4], y: bf16[8]):
    bx = view.dtype(x, u8)
    by = view.dtype(y, u8)
    rx = view(bx, [2, 8])
    ry = view(by, [2, 8])
    rows = cat([rx, ry], 1)
    r = all_to_all(rows, [1, 1], [1, 1], 'dp')
    w = wait(r)
    sa = slice(w, 1, 0, 8)
    sb = slice(w, 1, 8, 16)
    ca = reshape(sa, [16])
    cb = reshape(sb, [16])
    wa = view.dtype(ca, f32)
    wb = view.dtype(cb, bf16)
    return [wa, wb]
""",
    ),
    "a gather into a given buffer": (
        """
def graph(x: f32[4], y: f32[4]):
    a = all_gather(x, 2, 'dp')
    b = all_gather(y, 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[4], y: f32[4]):
    out = empty.memory_format([16], dtype=f32)
    both = cat([x, y])
    r = all_gather_out(both, 2, 'dp', out=out)
    w = wait(r)
    rows = view(out, [2, 8])
    sa = slice(rows, 1, 0, 4)
    sb = slice(rows, 1, 4, 8)
    wa = reshape(sa, [8])
    wb = reshape(sb, [8])
    return [wa, wb]
""",
    ),
    "in-place reductions of slices of a buffer": (
        """
def graph(x: f32[4], y: f32[6]):
    a = all_reduce(x, 'sum', 'dp')
    b = all_reduce(y, 'sum', 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(x: f32[4], y: f32[6]):
    buffer = empty.memory_format([10], dtype=f32)
    head = slice(buffer, 0, 0, 4)
    tail = slice(buffer, 0, 4, 10)
    first = copy_(head, x)
    second = copy_(tail, y)
    r = all_reduce_(buffer, 'sum', 'dp')
    w = wait(r)
    return [head, tail]
""",
    ),
    "a duplicate": (
        """
def graph(x: f32[4], y: f32[8]):
    a = all_gather(x, 2, 'dp')
    wa = wait(a)
    p = mul(wa, y)
    b = all_gather(x, 2, 'dp')
    wb = wait(b)
    q = sub(wb, y)
    return [p, q]
""",
        """
def graph(x: f32[4], y: f32[8]):
    a = all_gather(x, 2, 'dp')
    wa = wait(a)
    q = sub(wa, y)
    p = mul(wa, y)
    return [p, q]
""",
    ),
    "an accumulated gradient": (
        """
def graph(x: f32[4, 2], y: f32[6], gx: f32[4, 2], gy: f32[6]):
    a = all_reduce(x, 'sum', 'dp')
    b = all_reduce(y, 'sum', 'dp')
    wa = wait(a)
    wb = wait(b)
    na = add(gx, wa)
    nb = add(gy, wb)
    ca = copy_(gx, na)
    cb = copy_(gy, nb)
    return [na]
""",
        """
def graph(x: f32[4, 2], y: f32[6], gx: f32[4, 2], gy: f32[6]):
    fx = view(x, [8])
    bucket = cat([fx, y])
    r = all_reduce(bucket, 'sum', 'dp')
    w = wait(r)
    fa = slice(w, 0, 0, 8)
    wb = slice(w, 0, 8, 14)
    wa = view(fa, [4, 2])
    nb = add(gy, wb)
    cb = copy_(gy, nb)
    na = add(gx, wa)
    ca = copy_(gx, na)
    return [na]
""",
    ),
}

NOT_BY_ROWS = "vx = view(x, [16])\n    vy = view(y, [12])\n    vz = view(z, [12])\n    bucket = cat([vx, vy, vz])"
WRONG: list[tuple[str, str, str]] = [
    ("all-reduces", "cat([fx, y, fz])", "cat([fx, fz, y])"),
    ("all-reduces", "cat([fx, y, fz])", "cat([fx, y, y])"),
    ("all-reduces", "pa = parts[0]", "pa = slice(w, 0, 1, 9)"),
    ("all-reduces", "'dp'", "'tp'"),
    ("all-reduces", "'sum'", "'avg'"),
    ("all-reduces", "'sum'", "'max'"),
    ("all-reduces", "pc = parts[2]", "pc = parts[1]"),
    ("all-reduces", "wb = parts[1]", "wb = slice(w, 0, 7, 13)"),
    ("all-reduces", "return [wa, wb, wc]", "return [wa, y, wc]"),
    ("all-gathers", "cat([fx, fy, z])", "cat([fx, z, fy])"),
    ("all-gathers", "pb = parts[1]", "pb = parts[2]"),
    ("all-gathers", "rows = view(w, [2, 32])", "turned = view(w, [32, 2])\n    rows = t(turned)"),
    ("all-gathers", "'dp'", "'tp'"),
    ("all-gathers", "pc = parts[2]", "pc = slice(rows, 1, 19, 31)"),
    ("reduce-scatters", "cat([rx, ry, rz], 1)", "cat([rx, rz, ry], 1)"),
    ("reduce-scatters", "cat([rx, ry, rz], 1)", "cat([rx, ry, ry], 1)"),
    ("reduce-scatters", "rows = cat([rx, ry, rz], 1)\n    bucket = view(rows, [40])", NOT_BY_ROWS),
    ("reduce-scatters", "'avg'", "'sum'"),
    ("reduce-scatters", "'dp'", "'tp'"),
    ("reduce-scatters", "pc = parts[2]", "pc = parts[1]"),
    ("all-to-alls", "cat([rx, ry], 1)", "cat([ry, rx], 1)"),
    ("all-to-alls", "'dp'", "'tp'"),
    ("all-to-alls", "pa = parts[0]", "pa = slice(w, 1, 1, 9)"),
    ("broadcasts", "broadcast(bucket, 1", "broadcast(bucket, 0"),
    ("broadcasts", "cat([fx, y])", "cat([y, fx])"),
    ("broadcasts", "'dp'", "'tp'"),
    ("coalesced", "[x, y], 'max'", "[x, y], 'min'"),
    ("coalesced", "both = all_reduce_coalesced([x, y]", "fx = view(x, [8])\n    both = all_reduce_coalesced([x, fx]"),
    ("gathers with a folded cast", "sb = slice(rows, 1, 4, 8)", "sb = slice(rows, 1, 3, 7)"),
    ("gathers with a folded cast", "cat([x, y])", "cat([y, x])"),
    ("gathers with a folded cast", "_to_copy(both, dtype=bf16)", "_to_copy(both, dtype=f16)"),
    ("gradients with a folded division", "div(both, 2.0)", "div(both, 4.0)"),
    ("gradients with a folded division", "div(both, 2.0)", "relu(both)"),
    ("gradients with a folded division", "all_reduce(scaled", "all_reduce(both"),
    ("gathers of two dtypes packed by bytes", "cat([bx, by])", "cat([by, bx])"),
    ("gathers of two dtypes packed by bytes", "slice(rows, 1, 0, 16)", "slice(rows, 1, 4, 20)"),
    ("gathers of two dtypes packed by bytes", "wb = view.dtype(cb, bf16)", "wb = view.dtype(cb, f16)"),
    ("gathers of two dtypes packed by bytes", "slice(rows, 1, 16, 28)", "slice(rows, 1, 15, 27)"),
    ("exchanges of two dtypes packed by bytes", "cat([rx, ry], 1)", "cat([ry, rx], 1)"),
    ("a gather into a given buffer", "rows = view(out, [2, 8])", "rows = view(out, [2, 8])\n    z = zero_(out)"),
    ("a gather into a given buffer", "cat([x, y])", "cat([y, x])"),
    ("in-place reductions of slices of a buffer", "copy_(tail, y)", "copy_(tail, y)\n    third = mul_(head, 2.0)"),
    ("in-place reductions of slices of a buffer", "return [head, tail]", "return [head, y]"),
    ("a duplicate", "sub(wa, y)", "sub(y, wa)"),
    ("an accumulated gradient", "cb = copy_(gy, nb)", "cb = copy_(gy, wb)"),
    ("an accumulated gradient", "ca = copy_(gx, na)\n", "ca = relu(na)\n"),
    ("an accumulated gradient", "na = add(gx, wa)", "na = add(wa, wa)"),
]


def module(text: str) -> GraphModule:
    return weft.parse(HEADER + text.lstrip())


def proof(before: str, after: str, **options: bool) -> Proof:
    return prove(module(before), module(after), **options)


@pytest.mark.parametrize("case", BUCKETS)
def test_a_bucket_is_proved_equal_to_its_members(case: str):
    before, after = BUCKETS[case]
    assert weft.verify(module(before), module(after), ranks=4).bitwise
    found = proof(before, after)
    assert found.proved, found.difference
    assert found.difference == ""
    assert found.num_values > 0
    assert proof(after, before).proved


@pytest.mark.parametrize(("case", "right", "wrong"), WRONG)
def test_a_wrong_bucket_is_not_proved(case: str, right: str, wrong: str):
    before, after = BUCKETS[case]
    assert right in after
    changed = after.replace(right, wrong)
    assert not weft.verify(module(before), module(changed), ranks=4).bitwise, "the mutation changes nothing"
    found = proof(before, changed)
    assert not found.proved
    assert found.difference


@pytest.mark.parametrize("case", BUCKETS)
def test_a_wait_that_is_missing_is_not_proved(case: str):
    before, after = BUCKETS[case]
    first = next(line for line in after.splitlines() if "wait(" in line)
    name, _, launch = first.strip().partition(" = ")
    changed = after.replace(first, f"    {name} = view_as({launch[5:-1]}, {launch[5:-1]})")
    assert not proof(before, changed).proved


# What else is proved, and what is not.

SYMBOLS = "symbol('s0', hint=8)\nsymbol('s1', hint=6)\n\n"
SYMBOLIC: dict[str, tuple[str, str]] = {
    "all-reduces": (
        """
def graph(n: int[s0], m: int[s1], x: f32[s0, 4], y: f32[s1]):
    a = all_reduce(x, 'sum', 'dp')
    b = all_reduce(y, 'sum', 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(n: int[s0], m: int[s1], x: f32[s0, 4], y: f32[s1]):
    n4 = operator.mul(n, 4)
    fx = view(x, [n4])
    bucket = cat([fx, y])
    r = all_reduce(bucket, 'sum', 'dp')
    w = wait(r)
    parts = split_with_sizes(w, [n4, m])
    pa = parts[0]
    wb = parts[1]
    wa = view(pa, [n, 4])
    return [wa, wb]
""",
    ),
    "all-gathers": (
        """
def graph(n: int[s0], m: int[s1], x: f32[s0, 4], y: f32[s1]):
    a = all_gather(x, 2, 'dp')
    b = all_gather(y, 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(n: int[s0], m: int[s1], x: f32[s0, 4], y: f32[s1]):
    n4 = operator.mul(n, 4)
    n2 = operator.mul(n, 2)
    m2 = operator.mul(m, 2)
    t = operator.add(n4, m)
    fx = view(x, [n4])
    bucket = cat([fx, y])
    r = all_gather(bucket, 2, 'dp')
    w = wait(r)
    rows = view(w, [2, t])
    parts = split_with_sizes(rows, [n4, m], 1)
    pa = parts[0]
    pb = parts[1]
    wa = reshape(pa, [n2, 4])
    wb = reshape(pb, [m2])
    return [wa, wb]
""",
    ),
    "reduce-scatters": (
        """
def graph(n: int[s0], m: int[s1], x: f32[2*s0, 4], y: f32[2*s1]):
    a = reduce_scatter(x, 'sum', 2, 'dp')
    b = reduce_scatter(y, 'sum', 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
""",
        """
def graph(n: int[s0], m: int[s1], x: f32[2*s0, 4], y: f32[2*s1]):
    n4 = operator.mul(n, 4)
    t = operator.add(n4, m)
    t2 = operator.mul(t, 2)
    rx = view(x, [2, n4])
    ry = view(y, [2, m])
    rows = cat([rx, ry], 1)
    bucket = view(rows, [t2])
    r = reduce_scatter(bucket, 'sum', 2, 'dp')
    w = wait(r)
    parts = split_with_sizes(w, [n4, m])
    pa = parts[0]
    wb = parts[1]
    wa = view(pa, [n, 4])
    return [wa, wb]
""",
    ),
}


@pytest.mark.parametrize("case", SYMBOLIC)
def test_a_bucket_of_symbolic_sizes_is_proved_and_with_swapped_members_is_not(case: str):
    before, after = (SYMBOLS + text.lstrip() for text in SYMBOLIC[case])
    found = proof(before, after)
    assert found.proved, found.difference
    for right, wrong in (("cat([fx, y])", "cat([y, fx])"), ("cat([rx, ry], 1)", "cat([ry, rx], 1)")):
        if right in after:
            assert not proof(before, after.replace(right, wrong)).proved


PACKED = (
    """
def graph(x: f32[4], y: f32[6], z: bf16[5]):
    cy = _to_copy(y, dtype=bf16)
    a = all_gather(x, 2, 'dp')
    b = all_gather(cy, 2, 'dp')
    c = all_gather(z, 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    wc = wait(c)
    return [wa, wb, wc]
""",
    """
def graph(x: f32[4], y: f32[6], z: bf16[5]):
    bucket = weft.pack.default([x, y, z], [f32, bf16, bf16], 1, 16)
    r = all_gather(bucket, 2, 'dp')
    w = wait(r)
    rows = view(w, [2, 48])
    sa = slice(rows, 1, 0, 16)
    sb = slice(rows, 1, 16, 28)
    sc = slice(rows, 1, 32, 42)
    da = view.dtype(sa, f32)
    db = view.dtype(sb, bf16)
    dc = view.dtype(sc, bf16)
    wa = reshape(da, [8])
    wb = reshape(db, [12])
    wc = reshape(dc, [10])
    return [wa, wb, wc]
""",
)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("[x, y, z], [f32", "[x, z, y], [f32"),
        ("[f32, bf16, bf16]", "[f32, f16, bf16]"),
        ("1, 16, 28)", "1, 18, 30)"),
        ("1, 32, 42)", "1, 16, 26)"),
    ],
)
def test_a_pack_with_casts_is_proved_and_a_wrong_one_is_not(right: str, wrong: str):
    before, after = PACKED
    assert weft.verify(module(before), module(after), ranks=4).bitwise
    found = proof(before, after)
    assert found.proved, found.difference
    assert right in after
    assert not proof(before, after.replace(right, wrong)).proved


def test_a_pack_by_rows_feeds_a_reduce_scatter():
    before = """
def graph(x: f32[4, 4], y: f32[6]):
    a = reduce_scatter(x, 'sum', 2, 'dp')
    b = reduce_scatter(y, 'sum', 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    return [wa, wb]
"""
    after = """
def graph(x: f32[4, 4], y: f32[6]):
    raw = weft.pack.default([x, y], [f32, f32], 2, 16)
    bucket = view.dtype(raw, f32)
    r = reduce_scatter(bucket, 'sum', 2, 'dp')
    w = wait(r)
    fa = slice(w, 0, 0, 8)
    wb = slice(w, 0, 8, 11)
    wa = view(fa, [2, 4])
    return [wa, wb]
"""
    assert proof(before, after).proved
    assert not proof(before, after.replace("2, 16)", "1, 16)")).proved


SUMS = (
    """
def graph(x: f32[4, 4], y: f32[4, 4], z: f32[4, 4]):
    a = reduce_scatter(x, 'sum', 2, 'dp')
    b = reduce_scatter(y, 'sum', 2, 'dp')
    c = reduce_scatter(z, 'sum', 2, 'dp')
    wa = wait(a)
    wb = wait(b)
    wc = wait(c)
    s = add(wa, wb)
    r = add(s, wc)
    return [r]
""",
    """
def graph(x: f32[4, 4], y: f32[4, 4], z: f32[4, 4]):
    s = add(z, y)
    r = add(x, s)
    a = reduce_scatter(r, 'sum', 2, 'dp')
    wa = wait(a)
    return [wa]
""",
)


def test_a_sum_of_reductions_is_the_reduction_of_the_sum_only_where_rounding_may_differ():
    before, after = SUMS
    assert proof(before, after, reassociates=True).proved
    assert not proof(before, after).proved
    assert not proof(before, after.replace("add(z, y)", "add(z, z)"), reassociates=True).proved
    assert not proof(before, after.replace("'dp'", "'tp'"), reassociates=True).proved
    maxima = [text.replace("'sum'", "'max'") for text in SUMS]
    assert not proof(*maxima, reassociates=True).proved


def test_an_operator_that_is_not_correctly_rounded_is_not_taken_apart():
    before = """
def graph(x: f32[3], y: f32[5]):
    a = OP(x)
    b = OP(y)
    return [a, b]
"""
    after = """
def graph(x: f32[3], y: f32[5]):
    both = cat([x, y])
    r = OP(both)
    a = slice(r, 0, 0, 3)
    b = slice(r, 0, 3, 8)
    return [a, b]
"""
    for op, exact in (("relu", True), ("neg", True), ("exp", False), ("sigmoid", False)):
        texts = [text.replace("OP", op) for text in (before, after)]
        assert proof(*texts).proved is exact
        assert proof(*texts, reassociates=True).proved


DRAWS = """
def graph(x: f32[4]):
    p = rand_like(x)
    q = rand_like(x)
    s = sub(p, q)
    return [s]
"""


def test_draws_are_told_apart_by_their_order_and_their_number():
    assert proof(DRAWS, DRAWS).proved
    assert not proof(DRAWS, DRAWS.replace("sub(p, q)", "sub(q, p)")).proved
    unused = DRAWS.replace("sub(p, q)", "relu(p)")
    found = proof(unused, unused.replace("    q = rand_like(x)\n", ""))
    assert found.difference == "random draws differ: 2 before, 1 after"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Twice the same target in one call: each write sees the one before it.
        ("r = _foreach_mul_.Scalar([b, b], 2.0)", "r = mul_(b, 2.0)"),
        ("r = _foreach_add_.List([b, c], [c, b])", "d = add(b, c)\n    r = copy_(b, d)\n    r2 = copy_(c, d)"),
        # A read before the write is no read behind it.
        (
            "d = relu(b)\n    r = mul_(b, 2.0)\n    r2 = copy_(c, d)",
            "r = mul_(b, 2.0)\n    d = relu(b)\n    r2 = copy_(c, d)",
        ),
        ("v = slice(b, 0, 0, 2)\n    r = zero_(v)", "v = slice(b, 0, 2, 4)\n    r = zero_(v)"),
        ("v = view(b, [2, 2])\n    u = t(v)\n    r = mul_(u, 2.0)", "v = view(b, [2, 2])\n    r = mul_(v, 3.0)"),
    ],
)
def test_writes_that_differ_are_not_proved(before: str, after: str):
    body = "\ndef graph(b: f32[4], c: f32[4]):\n    {}\n    return [b, c]\n"
    first, second = body.format(before), body.format(after)
    assert not weft.verify(module(first), module(second), ranks=4).bitwise
    assert not proof(first, second).proved
    assert proof(first, first).proved or "_foreach" in before


def test_a_write_through_a_view_is_seen_by_other_views():
    before = """
def graph(b: f32[4, 2], c: f32[2, 2]):
    head = slice(b, 0, 0, 2)
    w = copy_(head, c)
    flat = view(b, [8])
    r = relu(flat)
    return [r]
"""
    after = """
def graph(b: f32[4, 2], c: f32[2, 2]):
    tail = slice(b, 0, 2, 4)
    both = cat([c, tail])
    w = copy_(b, both)
    flat = view(both, [8])
    r = relu(flat)
    return [r]
"""
    assert weft.verify(module(before), module(after), ranks=4).bitwise
    assert proof(before, after).proved


def test_what_leaves_in_flight_is_not_what_was_complete():
    text = "\ndef graph(x: f32[4]):\n    a = all_reduce(x, 'sum', 'dp')\n    w = wait(a)\n    return [w]\n"
    flying = text.replace("    w = wait(a)\n", "").replace("[w]", "[a]")
    assert proof(flying, text).proved
    found = proof(text, flying)
    assert found.difference == "tensor 0 of the outputs is complete before and still in flight after"


def test_a_difference_names_the_nodes_of_both_graphs():
    before, after = BUCKETS["all-reduces"]
    found = proof(before, after.replace("cat([fx, y, fz])", "cat([fx, fz, y])"))
    assert str(found) == (
        "not proved equal: outputs[1] may differ: "
        "from element 0, the graph before uses y (input 1) where the graph after uses z (input 2)"
    )
    found = proof(before, after.replace("'sum'", "'max'"))
    assert found.difference == (
        "outputs[0] may differ: "
        "from element 0, the graph before uses a (all_reduce sum dp) where the graph after uses r (all_reduce max dp)"
    )


def test_graphs_with_other_inputs_or_outputs_are_not_equal():
    text = "\ndef graph(x: f32[4]):\n    a = relu(x)\n    return [a]\n"
    found = proof(text, text.replace("x: f32[4]", "x: f32[4], y: f32[4]"))
    assert found.difference == "the graph has 1 inputs before and 2 after"
    assert proof(text, text.replace("[a]", "[a, x]")).difference == "outputs is a list of 1 before, a list of 2 after"
    assert not proof(text, text.replace("f32[4]", "f32[5]")).proved
    assert not proof(text, text.replace("f32[4]", "bf16[4]")).proved


def test_groups_of_one_name_and_other_ranks_are_other_groups():
    text = "\ndef graph(x: f32[4]):\n    a = all_reduce(x, 'sum', 'dp')\n    w = wait(a)\n    return [w]\n"
    modules = [weft.parse(f"group('dp', size=2, stride={stride})\n{text}") for stride in (1, 2)]
    assert not prove(*modules).proved
    assert prove(modules[0], modules[0]).proved


def in_groups(first: str, second: str, head: str) -> GraphModule:
    return weft.parse(f"""{head}
def graph(x: f32[4], y: f32[4]):
    a = all_reduce(x, 'sum', {first!r})
    wa = wait(a)
    b = all_reduce(y, 'sum', {second!r})
    wb = wait(b)
    return [wa, wb]
""")


def test_groups_are_told_by_their_ranks_and_what_they_are_and_not_by_names():
    head = "group('g0', size=2)\ngroup('g1', size=2, id='#1')\n"
    before = in_groups("g0", "g1", head)
    assert prove(before, in_groups("g1", "g0", "group('g1', size=2)\ngroup('g0', size=2, id='#1')\n")).proved
    assert not prove(before, in_groups("g1", "g0", head)).proved
    ranks = "group('g0', size=2, stride=2)\ngroup('g1', size=2)\n"
    assert prove(in_groups("g0", "g1", ranks), in_groups("g0", "g1", ranks)).proved
    assert not prove(in_groups("g0", "g1", ranks), in_groups("g1", "g0", ranks)).proved


def test_nothing_is_proved_of_groups_that_nothing_tells_apart():
    head = "group('g0', size=2)\ngroup('g1', size=2)\n"
    before, after = in_groups("g0", "g1", head), in_groups("g0", "g1", head)
    assert prove(before, after).difference.startswith("groups: 'g0' and 'g1' have the same ranks")
    assert prove(before, weft.optimize(before, pipeline="clean").module).proved  # one table, so names tell


@needs_transfers
def test_an_operator_without_a_rule_counts_by_its_group_and_not_by_the_name():
    text = "\ndef graph(x: f32[4]):\n    a = send(x, 1, 0, 'g0')\n    w = wait(a)\n    return [w]\n"
    sides = [weft.parse(f"group('g0', size=2{known})\n{text}") for known in ("", ", id='#1'")]
    assert prove(sides[0], sides[0]).proved
    assert not prove(*sides).proved


def nested(*groups: str) -> GraphModule:
    """A call of a graph that reduces in each group in turn."""
    inner = torch.fx.Graph()
    x = inner.placeholder("x")
    for group in groups:
        x = inner.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", group))
        x = inner.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    inner.output(x)
    outer = torch.fx.Graph()
    value = torch.empty(4)
    given = outer.placeholder("x")
    body = outer.get_attr("body")
    called = outer.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", given))
    item = outer.call_function(operator.getitem, (called, 0))
    outer.output([item])
    for node in (given, item):
        node.meta["val"] = value
    called.meta["val"] = (value,)
    for node in inner.nodes:
        node.meta["val"] = value
    return GraphModule({"body": GraphModule({}, inner)}, outer)


def test_groups_swapped_inside_a_nested_graph_are_not_proved_equal():
    with fake_mesh():
        first, second = (dist.new_group([0, 1]).group_name for _ in range(2))
        assert prove(nested(first, second), nested(first, second)).proved
        assert not prove(nested(first, second), nested(second, first)).proved
        assert not prove(nested(first), nested(second)).proved
    assert prove(nested("5"), nested("5")).proved
    assert not prove(nested("5"), nested("6")).proved


def test_a_reordering_of_two_live_groups_is_proved():
    def step(a: torch.Tensor, w: torch.Tensor, pair: str, other: str) -> list[torch.Tensor]:
        functional = torch.ops._c10d_functional
        x = functional.wait_tensor(functional.all_gather_into_tensor(a, 2, pair)) @ w
        y = functional.wait_tensor(functional.all_gather_into_tensor(a, 2, other)) @ w
        return [x, functional.wait_tensor(functional.reduce_scatter_tensor(y, "sum", 2, pair))]

    with fake_mesh():
        pair, other = dist.new_group([0, 1]).group_name, dist.new_group([0, 2]).group_name
        inputs = (torch.zeros(4, 6), torch.zeros(6, 5))
        module = make_fx(lambda a, w: step(a, w, pair, other), tracing_mode="fake")(*inputs)
        result = weft.optimize(module, "h100-8", pipeline="schedule-overlap", verify="equivalence")
        assert "proved equal" in result.report.witnesses[-1]
        order = [node.args[2] for node in result.module.graph.nodes if "all_gather" in node.name]
    assert order == [other, pair]


def test_a_group_size_that_is_not_that_of_the_group_proves_nothing():
    text = "\ndef graph(x: f32[4]):\n    a = all_gather(x, 4, 'dp')\n    w = wait(a)\n    return [w]\n"
    expected = "cannot follow a in the graph before the rewrite: it has group_size 4, but group 'dp' has 2 ranks"
    assert proof(text, text).difference == expected


@needs_transfers
def test_transfers_are_told_apart_by_their_order():
    text = """
def graph(x: f32[4], y: f32[4], z: f32[4]):
    first = batch_p2p(['isend', 'irecv'], [1, 1], [0, 0], [x, y], 'dp')
    a = first[0]
    b = first[1]
    wa = wait(a)
    wb = wait(b)
    second = batch_p2p(['isend', 'irecv'], [1, 1], [0, 0], [x, z], 'dp')
    c = second[0]
    d = second[1]
    wc = wait(c)
    wd = wait(d)
    return [wb, wd, wa, x]
"""
    assert proof(text, text).proved
    swapped = text.replace("[x, y]", "[x, w]").replace("[x, z]", "[x, y]").replace("[x, w]", "[x, z]")
    assert not proof(text, swapped.replace("[wb, wd", "[wd, wb")).proved


def test_a_constant_is_compared_by_its_bits():
    def scaled(constant: torch.Tensor) -> GraphModule:
        found = module("\ndef graph(x: f32[2]):\n    a = relu(x)\n    return [a]\n")
        found.register_buffer("scale", constant)
        relu = next(node for node in found.graph.nodes if node.op == "call_function")
        with found.graph.inserting_before(relu):
            node = found.graph.get_attr("scale")
        node.meta["val"] = relu.meta["val"]
        relu.replace_input_with(relu.args[0], node)
        return found

    first = scaled(torch.tensor([1.0, 0.0]))
    assert prove(first, scaled(torch.tensor([1.0, 0.0]))).proved
    assert not prove(first, scaled(torch.tensor([1.0, -0.0]))).proved


SHARED = """def graph(x: f32[4]):
    def body(a: f32[4], b: f32[4]):
        v: f32[4] = view(a, [4])
        u: f32[4] = view(b, [4])
        return (v, u)
    body = attribute('body')
    a: f32[4] = {a}
    b: f32[4] = {b}
    call: (f32[4], f32[4]) = higher_order.wrap_with_set_grad_enabled(False, body, a, b)
    v: f32[4] = call[0]
    u: f32[4] = call[1]
    c = {write}
    return [a, b]
"""
CLONES = {"a": "clone(x)", "b": "clone(x)"}


def test_a_write_through_a_result_of_a_nested_graph_is_seen():
    written = weft.parse(SHARED.format(**CLONES, write="add_(v, 1)"))
    assert prove(written, weft.parse(SHARED.format(**CLONES, write="add_(v, 1)")))
    assert not prove(written, weft.parse(SHARED.format(**CLONES, write="neg(v)")))


@pytest.mark.parametrize("made", ["clone(x)", "zeros([4], device=device('cpu'), pin_memory=False)"])
@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("v", "u")])
def test_one_of_two_tensors_with_the_same_content_that_may_share_memory_is_not_the_other(
    made: str, first: str, second: str
):
    before, after = (
        weft.parse(SHARED.format(a=made, b=made, write=f"add_({written}, 1)")) for written in (first, second)
    )
    assert not prove(before, after)


RESIZED = """def graph(w: f32[4], x: f32[4]):
    v: f32[2] = slice(w, 0, 0, 2)
    r0 = inductor.resize_storage_bytes_.default(w, 16)
    c: f32[4] = copy_(w, x)
{rest}
    return [y]
"""


def test_a_read_after_the_storage_is_freed_is_not_the_read_before():
    read, free = "    y: f32[4] = neg(w)", "    r1 = inductor.resize_storage_bytes_.default(v, 0)"
    before, after = (weft.parse(RESIZED.format(rest="\n".join(order))) for order in ((read, free), (free, read)))
    assert prove(before, before)
    assert not prove(before, after)
