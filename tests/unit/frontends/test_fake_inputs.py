"""Leaves are fakes of the device that is captured for."""

from __future__ import annotations

import torch

from weft.compat import new_fake_mode
from weft.frontends.fake_inputs import Faker


def test_a_leaf_is_on_the_device_that_is_captured_for_whatever_the_tensor_is_on() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    found = Faker(new_fake_mode(), torch.device("meta")).leaf(tensor)
    assert (found.device.type, found.shape, found.requires_grad) == ("meta", (2, 3), True)
    assert Faker(new_fake_mode()).leaf(tensor.detach().to("meta")).device.type == "cpu"
