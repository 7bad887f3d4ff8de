"""`weft::pack`: its layout against a naive packing by numpy, byte for byte, and as an operator of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.bucketing.pack import ALIGNMENT, PACK, row_layout
from weft.compat import dtype_of, new_fake_mode

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
BYTES = torch.uint8


def bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    return flat.view(BYTES).numpy().tobytes() if flat.numel() else b""


def packed_naively(tensors: list[Tensor], dtypes: list[torch.dtype], num_rows: int, alignment: int) -> np.ndarray:
    """Rows one after another; in each, the bytes of that row of every tensor, then zeros up to a full alignment."""
    out = bytearray()
    for row in range(num_rows):
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            flat = tensor.to(dtype).reshape(-1)
            width = flat.numel() // num_rows
            out += bytes_of(flat[row * width : (row + 1) * width])
            out += bytes(-len(out) % alignment)
    return np.frombuffer(bytes(out), dtype=np.uint8)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Tensor], list[torch.dtype], int]:
    num_rows = draw(st.integers(1, 4))
    count = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    tensors: list[Tensor] = []
    for _ in range(count):
        shape = (num_rows * draw(st.integers(0, 3)), draw(st.integers(0, 5)))
        value = torch.randint(-100, 100, shape[::-1], generator=generator).to(draw(st.sampled_from(DTYPES)))
        tensors.append(value.t() if draw(st.booleans()) else value.t().contiguous())
    dtypes = [draw(st.sampled_from([t.dtype, torch.float32, torch.bfloat16])) for t in tensors]
    return tensors, dtypes, num_rows


@settings(max_examples=150, deadline=None)
@given(calls())
def test_the_bytes_are_those_of_a_naive_packing(call: tuple[list[Tensor], list[torch.dtype], int]):
    tensors, dtypes, num_rows = call
    packed = PACK(tensors, dtypes, num_rows, ALIGNMENT)
    assert np.array_equal(packed.numpy(), packed_naively(tensors, dtypes, num_rows, ALIGNMENT))


@settings(max_examples=50, deadline=None)
@given(calls())
def test_the_fake_kernel_gives_the_shape_and_dtype_of_the_real_one(call: tuple[list[Tensor], list[torch.dtype], int]):
    tensors, dtypes, num_rows = call
    real = PACK(tensors, dtypes, num_rows, ALIGNMENT)
    with new_fake_mode() as mode:
        fake = PACK([mode.from_tensor(tensor) for tensor in tensors], dtypes, num_rows, ALIGNMENT)
    assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


def test_one_dtype_at_its_own_alignment_is_a_concatenation():
    tensors = [torch.randn(2, 3), torch.randn(5)]
    packed = PACK(tensors, [torch.float32] * 2, 1, 4).view(torch.float32)
    assert torch.equal(packed, torch.cat([tensor.reshape(-1) for tensor in tensors]))


def test_rows_lie_side_by_side():
    packed = PACK([torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])], [torch.float32] * 2, 2, 4)
    assert packed.view(torch.float32).tolist() == [1.0, 2.0, 5.0, 3.0, 4.0, 6.0]


def test_tensors_are_converted_as_a_cast_does():
    value = torch.randn(7)
    packed = PACK([value], [torch.bfloat16], 1, 2)
    assert torch.equal(packed.view(torch.bfloat16), value.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("sizes", "alignment", "expected"),
    [
        ([6, 16, 2], 16, ([0, 16, 32], 48)),
        ([3, 5], 1, ([0, 3], 8)),
        ([0, 4, 0], 16, ([0, 0, 16], 16)),
        ([], 16, ([], 0)),
    ],
)
def test_each_size_begins_at_a_multiple_of_the_alignment(
    sizes: list[int], alignment: int, expected: tuple[list[int], int]
):
    assert row_layout(sizes, alignment) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_torch_finds_nothing_wrong_with_the_operator(dtype: torch.dtype, num_rows: int):
    tensors = [torch.randn(2, 3), torch.randn(4).to(torch.bfloat16), torch.randn(6, 2).t()]
    # Not "test_schema": torch 2.13 cannot convert a list of dtypes there. The next test looks at what it would.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(PACK, (tensors, [dtype] * 3, num_rows, ALIGNMENT), test_utils=checks)


def test_it_writes_to_nothing_and_returns_memory_of_its_own():
    tensors = [torch.zeros(16, dtype=BYTES), torch.ones(16, dtype=BYTES)]
    packed = PACK(tensors, [BYTES] * 2, 1, ALIGNMENT)
    packed.fill_(7)
    assert [tensor.tolist() for tensor in tensors] == [[0] * 16, [1] * 16]
    alone = PACK(tensors[:1], [BYTES], 1, ALIGNMENT)
    assert alone.untyped_storage().data_ptr() != tensors[0].untyped_storage().data_ptr()


def test_it_runs_under_torch_compile():
    def function(x: Tensor, y: Tensor) -> Tensor:
        return PACK([x * 2, y], [torch.bfloat16, torch.float32], 1, ALIGNMENT).view(torch.int16) + 1

    inputs = [torch.randn(3), torch.randn(2, 2)]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.float32, torch.bfloat16, torch.bool])
def test_dtypes_given_as_numbers_are_those_of_torch(dtype: torch.dtype):
    """As torch up to 2.12 gives them: the number of a dtype is what torch makes that dtype of."""
    found = [n for n in range(16) if n not in (12, 13, 14) and dtype_of(n) is dtype]  # 12 to 14 are quantized
    assert len(found) == 1
    assert dtype_of(dtype) is dtype
