"""A model as others load it: safetensors shards, configuration, tokenizer; from an engine or from a checkpoint."""

from outcore.checkpoint.export.files import (
    FOLDER,
    base_of,
    configured,
    export_checkpoint,
    has_adapter,
    how_to_load,
    is_adapter,
    merge_adapter,
    merge_checkpoint,
    model_folder,
    save_export_files,
)
from outcore.checkpoint.export.model import check_login, export_model, push
