"""What a model is, read from its config and its skeleton without weights, and what checkpoints call its parameters."""

from outcore.model.facts.facts import (
    ModelFacts,
    language_config,
    model_class_of,
    model_facts,
    parameter_types,
    quantization_of,
    resolve_attention,
    skeleton_and_tied,
)
from outcore.model.facts.gguf_file import GgufTensor, gguf_config_fields, gguf_header
from outcore.model.facts.names import (
    ConfigKey,
    adapter_name,
    checkpoint_name,
    end_ids,
    named_checkpoint_parameters,
    persistent_buffers,
    read_end_tokens,
    set_end_tokens,
    undecayed,
)
