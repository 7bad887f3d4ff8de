"""The symbolic witness: what it proves of buckets, and what it must never prove."""


import pytest
from torch.fx import GraphModule

import weft
from weft.verification.equivalence import Proof, prove

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
