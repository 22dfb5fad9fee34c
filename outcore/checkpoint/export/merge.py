"""A LoRA checkpoint merged into its base, without a run: the base is read from where it came from.

RAM: the base in the precision that it is stored in. Merged weights are computed one layer at a time, as they are
written (`export_model`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from outcore.checkpoint.export.files import ADAPTER, FOLDER, export_checkpoint
from outcore.checkpoint.export.model import export_model
from outcore.checkpoint.folders import Checkpoint
from outcore.checkpoint.shards import CheckpointError
from outcore.model.adapters import settle_trained_modules


def has_adapter(checkpoint: Checkpoint) -> bool:
    """True for a checkpoint of a LoRA run."""
    return (checkpoint.path / FOLDER / ADAPTER).is_file()


def merge_checkpoint(checkpoint: Checkpoint, target: Path) -> Path:
    """The whole model with the adapter in it, in `target`, which must not exist yet. CheckpointError where there is no
    adapter, or no base to merge it into."""
    if not has_adapter(checkpoint):
        raise CheckpointError(f"{checkpoint.path}: all weights were trained, nothing is to merge: leave --merge out.")
    if target.exists():
        raise CheckpointError(f"{target}: exists already. Give another folder with --out, or remove it.")
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        adapter = export_checkpoint(checkpoint, aside / "adapter")
        base = json.loads((adapter / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not base:
            raise CheckpointError(f"{checkpoint.path}: its base was made from scratch, so there is none to merge into.")
        config = AutoConfig.from_pretrained(base)
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        network = PeftModel.from_pretrained(auto.from_pretrained(base, dtype="auto"), str(adapter))
        settle_trained_modules(network)
        tokenizer = AutoTokenizer.from_pretrained(adapter)
        export_model(target, network, lambda parameter: parameter.detach(), tokenizer=tokenizer)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target
