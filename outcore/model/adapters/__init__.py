"""Adapters through peft beside a frozen base: where they go, how they start, what is trained beside them."""

import logging

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
from outcore.model.adapters.rows import RowChoice, by_rows
from outcore.model.adapters.targets import linear_names

_HINT = "Failed to load CPU gemm_4bit_forward from kernels-community"
# peft imports bitsandbytes, which says at each start that a kernel for its own 4-bit layers is missing: none is used.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: not str(record.msg).startswith(_HINT))
