"""A byte-level BPE tokenizer in the words of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outcore.formats.gguf_files.rules import GgufRefused


def add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Write the folder's tokenizer.json. GgufRefused for other kinds than byte-level BPE."""
    import gguf

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise GgufRefused(f"{folder} has no tokenizer.json, and a GGUF file carries its tokenizer")
    described = json.loads(path.read_text(encoding="utf-8"))
    model = described["model"]
    parts = _flat(described.get("pre_tokenizer"))
    if model["type"] != "BPE" or all(part["type"] != "ByteLevel" for part in parts):
        raise GgufRefused(f"its tokenizer is {model['type']}; only byte-level BPE is written to GGUF files here")
    added = {token["id"]: token for token in described.get("added_tokens", [])}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {number: token["content"] for number, token in added.items()}
    tokens, types = [], []
    for number in range(max(vocab_size, max(by_id) + 1)):
        tokens.append(by_id.get(number, f"[PAD{number}]"))
        if number not in by_id:
            types.append(gguf.TokenType.UNUSED)
        elif number in added:
            types.append(gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting(parts))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_token_merges(merges)
    gguf.SpecialVocab(folder, load_merges=False, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)


def _flat(described: Any) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer."""
    if described is None:
        return []
    return described["pretokenizers"] if described["type"] == "Sequence" else [described]


def _splitting(parts: list[dict[str, Any]]) -> str:
    """llama.cpp's name for how text is split before merging. GgufRefused for a way that it has no name for here."""
    patterns = [str(part.get("pattern", {}).get("Regex", "")) for part in parts if part["type"] == "Split"]
    if any(part["type"] == "Digits" and part.get("individual_digits") for part in parts) and not patterns:
        return "smollm"
    if not patterns:
        return "gpt-2"
    if len(patterns) == 1 and "(?i:" in patterns[0]:
        return "llama-bpe" if r"\p{N}{1,3}" in patterns[0] else "qwen2"
    raise GgufRefused(f"its tokenizer splits text in a way that has no name here: {patterns[0][:60]}")
