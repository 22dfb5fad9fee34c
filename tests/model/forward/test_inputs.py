"""What a model's forward takes."""

from __future__ import annotations

import functools
import gc
import weakref

from torch import nn

from outcore.model.forward import accepted_names


class Own(nn.Module):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


def test_a_wrapped_forward_is_asked_and_lets_its_model_go():
    model = Own()
    usual = model.forward
    vars(model)["forward"] = functools.update_wrapper(functools.partial(Own.forward, model), usual)
    expected = frozenset({"input_ids", "attention_mask"}), False
    assert accepted_names(model) == accepted_names(Own()) == expected
    gone = weakref.ref(model)
    del model, usual
    gc.collect()
    assert gone() is None
