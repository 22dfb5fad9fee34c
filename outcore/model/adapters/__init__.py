"""Adapters through peft beside a frozen base: where they go, how they start, what is trained beside them."""

from outcore.model.adapters.experts import add_to_products, merge_stack
from outcore.model.adapters.lora import (
    adapted_layers,
    apply_lora,
    dora_lengths,
    multiply_dora,
    row_lengths,
    settle_trained_modules,
    tied_apart,
    with_adapters,
)
from outcore.model.adapters.targets import linear_names
