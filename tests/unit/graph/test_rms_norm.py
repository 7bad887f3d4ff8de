"""The RMS norm as one kernel: values and gradients are those of its formula."""

from __future__ import annotations

import pytest
import torch

from weft.graph.rms_norm import RMS_NORM, RMS_NORM_BACKWARD


def test_the_norm_and_its_gradients_are_those_of_the_formula():
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    normed, scales = RMS_NORM(x.detach(), weight.detach(), 1e-5)
    torch.testing.assert_close(normed, expected)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, weight], gradient)
    torch.testing.assert_close(RMS_NORM_BACKWARD(gradient, x.detach(), scales, weight.detach()), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_do_what_their_schemas_say(dtype: torch.dtype):
    x, weight = torch.randn(2, 3, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(RMS_NORM, (x, weight, 1e-5), test_utils=tests)
    scales = torch.rand(2, 3, 1)
    torch.library.opcheck(RMS_NORM_BACKWARD, (x, x, scales, weight), test_utils=tests)
