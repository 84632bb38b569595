"""What is searched for values that are not finite."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from longrnn.models.finite import floating_tensors
from longrnn.training.nonfinite import Examination, _hooks


def test_all_floating_tensors_of_an_output_are_found() -> None:
    """In tuples, lists and mappings, such as the outputs of Hugging Face models."""
    one, two, three = (torch.ones(n) for n in (1, 2, 3))
    output = (one, [torch.arange(4), None], OrderedDict(a=two, b={"c": (three, "word")}))
    found = list(floating_tensors(output))
    assert [id(tensor) for tensor in found] == [id(one), id(two), id(three)]


def test_a_training_step_is_searched_in_mappings_too() -> None:
    """A module whose output is a mapping is named where its values stop being finite."""

    class Mapped(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"hidden": x / 0}

    seen, module = Examination(0.0, torch.ones(2, dtype=torch.bool)), Mapped()
    for _ in _hooks(seen, "model.inner", module):
        pass
    module(torch.ones(2, 3))
    assert str(seen.layer).endswith(" inner")
    assert not seen.finite_rows.any()
