"""Fake results are remembered by argument types: a remembered result is the one that the operator itself would give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.compat import call_fake, new_fake_mode, storage_key
from weft.graph import metadata
from weft.graph.metadata import call_remembered
from weft.graph.ops import op_of

MODE = new_fake_mode()


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("mm", (fake(4, 6), fake(6, 8)), {}),
        ("mm", (fake(4, 6), fake(8, 6).t()), {}),
        ("add", (fake(4, 6).t(), fake(6, 4)), {}),
        ("add", (fake(4, dtype=torch.int64), 1), {}),
        ("add", (fake(4, dtype=torch.int64), 1.0), {}),
        ("add", (fake(4, dtype=torch.bool), True), {}),
        ("view", (fake(4, 6), [24]), {}),
        ("reshape", (fake(4, 6), [24]), {}),
        ("reshape", (fake(4, 6).t(), [24]), {}),
        ("permute", (fake(4, 6, 2), [2, 0, 1]), {}),
        ("slice", (fake(4, 6)[1:], 1, 2, 4), {}),
        ("_to_copy", (fake(4, 6).t(),), {"dtype": torch.bfloat16}),
        ("cat", ([fake(4, 6), fake(4, 6)], 1), {}),
    ],
)
def test_the_second_answer_is_the_first_one(name: str, args: tuple[object, ...], kwargs: dict[str, object]):
    target = op_of(name)
    expected = call_fake(target, args, kwargs, MODE)
    for _ in range(2):
        found = call_remembered(target, args, kwargs, MODE)
        assert metadata.same(found, expected)
        tensors = [t for t in args if isinstance(t, Tensor)]
        shares = [storage_key(t) == storage_key(found) for t in tensors]
        assert shares == [storage_key(t) == storage_key(expected) for t in tensors]


def test_two_results_never_share_memory():
    args = (fake(4, 6), fake(6, 8))
    first, second = (call_remembered(op_of("mm"), args, {}, MODE) for _ in range(2))
    assert storage_key(first) != storage_key(second)


def test_a_new_tensor_begins_where_its_storage_begins_whatever_torch_was_asked_before():
    view, part = fake(8, 4)[4:], fake(2, 4)
    answers = [call_remembered(op_of("slice_scatter"), (view, part, 0, 0, 2), {}, MODE) for _ in range(2)]
    assert [answer.storage_offset() for answer in answers] == [0, 0]
    assert storage_key(answers[0]) not in (storage_key(view), storage_key(answers[1]))


def test_one_is_not_true_and_zero_is_not_minus_zero():
    x = fake(4, dtype=torch.bool)
    assert call_remembered(op_of("add"), (x, 1), {}, MODE).dtype == torch.int64
    assert call_remembered(op_of("add"), (x, True), {}, MODE).dtype == torch.bool
    assert call_remembered(op_of("add"), (x, 1), {}, MODE).dtype == torch.int64
