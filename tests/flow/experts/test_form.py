"""Which modules of a layer are experts that can come alone."""

from __future__ import annotations

from outcore.flow.experts.form import experts_of
from tests.flow.models import tiny_loaded


def test_experts_are_found_with_the_oldest_supported_library():
    """transformers 5.17 does not say whether experts are spread over processes; none was found there."""
    (layer, *_) = tiny_loaded("mixtral").model.model.layers
    module = experts_of(layer)
    assert module is layer.mlp.experts
    vars(module).pop("_is_expert_parallel", None)
    assert experts_of(layer) is module
    module._is_expert_parallel = True
    assert experts_of(layer) is None
