"""Facts of a model, read from its config and its skeleton without weights, and its parameters' names in checkpoints."""

from outcore.model.facts.facts import (
    ConfigKey,
    ModelFacts,
    adapter_name,
    checkpoint_name,
    end_ids,
    language_config,
    model_class_of,
    model_facts,
    named_checkpoint_parameters,
    parameter_types,
    persistent_buffers,
    quantization_of,
    read_end_tokens,
    resolve_attention,
    set_end_tokens,
    skeleton_and_tied,
    undecayed,
)
from outcore.model.facts.gguf_file import GgufTensor, gguf_config_fields, gguf_header
