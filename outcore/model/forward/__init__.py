"""A micro-batch through a model: its arguments, the model taken apart into decoder and head, a text's vector."""

from outcore.model.forward.head import CausalParts, unwrap
from outcore.model.forward.head_gradient import HeadGradient, has_one_gradient
from outcore.model.forward.inputs import (
    IGNORE,
    Batch,
    Isolation,
    accepted_names,
    attention_of,
    count_target_tokens,
    forward_inputs,
    shifted_targets,
)
from outcore.model.forward.pooling import Pooling, read_pooling, write_pooling
from outcore.model.forward.products import MATMULS, Float8Linear, LayerProducts, float8_product, float8_rounded
