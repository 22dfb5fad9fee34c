"""Which parameters have no weight decay: biases and norms, found as Hugging Face's Trainer finds them, by a norm's type
or by how it is called (`Trainer.get_decay_parameter_names`)."""

from __future__ import annotations

import re

from torch import nn

from outcore.model.facts.names import checkpoint_name

UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
"""Names, in lower case, of parameters without weight decay."""


def undecayed(model: nn.Module) -> frozenset[str]:
    """Checkpoint names of the model's parameters that have no weight decay."""
    named = {name for name, _ in model.named_parameters(remove_duplicate=False) if UNDECAYED.search(name.lower())}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            named.update(name for name, _ in module.named_parameters(prefix=prefix))
    return frozenset(map(checkpoint_name, named))
