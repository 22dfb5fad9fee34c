"""Variants of `stream_race.py` by group: ours, stock DeepSpeed, rivals; each as its child takes it."""

from __future__ import annotations

from typing import Any

TOKENS = {
    "16k": {"mb": 4, "seq": 1024, "gas": 4},
    "16k-mb8": {"mb": 8, "seq": 1024, "gas": 2},
    "16k-mb16": {"mb": 16, "seq": 1024, "gas": 1},
    "16k-mb2": {"mb": 2, "seq": 1024, "gas": 8},
    "16k-mb1": {"mb": 1, "seq": 1024, "gas": 16},
    "13.5k": {"mb": 9, "seq": 512, "gas": 3},
    "13.5k-one": {"mb": 27, "seq": 512, "gas": 1},
    "half-k": {"mb": 1, "seq": 512, "gas": 1},
    "1k-one": {"mb": 1, "seq": 1024, "gas": 1},
    "4k": {"mb": 4, "seq": 1024, "gas": 1},
    "158k": {"mb": 79, "seq": 1024, "gas": 2},
    "256k-one": {"mb": 1, "seq": 262144, "gas": 1},
    "tiny": {"mb": 2, "seq": 16, "gas": 2},
}


FAR, SMALL = 1e6, 1e-6
"""A limit of the gradients' norm that none of these runs reaches: the norm is waited for and nothing is clipped; and
one that every step clips to."""
BEST_OF_SWEEP = {"sub_group": 3e7, "prefetch": 5e7, "live": 1e9}
"""Stock DeepSpeed's best of a sweep of 1.2 B: 2.95 s a step where other settings took 3.30 to 4.01."""


def ours(shape: str, tokens: str, clip: float, states: str, **more: Any) -> dict[str, Any]:
    """A variant of the streaming engine."""
    on_nvme = more.pop("nvme", False)
    settings = {"max_grad_norm": clip, "states": states} | more
    return {"child": "race_ours.py", "shape": shape, **TOKENS[tokens], "settings": settings, "uses_nvme": on_nvme}


def stock(shape: str, tokens: str, clip: float, where: str, **more: Any) -> dict[str, Any]:
    """A variant of DeepSpeed as it is."""
    settings = BEST_OF_SWEEP | {"clip": clip, "where": where} | more
    return {"child": "race_stock.py", "shape": shape, **TOKENS[tokens], **settings}


def rival(shape: str, tokens: str, clip: float, system: str, **more: Any) -> dict[str, Any]:
    """A variant of a system that a user would pick instead: layers compiled and the loss in chunks unless said."""
    allocator = {"allocator": "expandable_segments:True"}
    settings = {"clip": clip, "system": system, "compile": True, "chunked": True} | more
    return {"child": "race_rivals.py", "shape": shape, **TOKENS[tokens], **settings} | allocator


def rivals(shape: str, four: str, one: str) -> dict[str, dict[str, Any]]:
    """Ours and every rival, the exact ones first; `four`, `one`: the same tokens in several micro-batches, in one.

    What makes rivals fast is one cut, compiled layers and a chunked loss (`-one`); `-as-used` is what most users run:
    several micro-batches, eager, logits whole. Of ours, `split` keeps the same masters in fewer bytes, as a run in bf16
    does by itself, and `-streamed` has no layer stay on the GPU. `-ahead`: with RAM for
    updates that begin before the norm is known, which steps that clip take back; `-far-clip`: no step clips,
    `-half-clip`: every other.
    """
    as_used = {"compile": False, "chunked": False}
    finer = {"roundpipe-eight-clip": "16k-mb2", "roundpipe-sixteen-clip": "16k-mb1"} if four == "16k" else {}
    two = {"16k": "16k-mb8"}.get(four, one)
    return {
        "ours-fp32-clip": ours(shape, four, 1, "fp32"),
        "ours-fp32-streamed-clip": ours(shape, four, 1, "fp32", resident_bytes=0),
        "ours-split-clip": ours(shape, four, 1, "split"),
        "ours-fp32-one-clip": ours(shape, one, 1, "fp32"),
        "ours-split-one-clip": ours(shape, one, 1, "split"),
        "ours-split-two-clip": ours(shape, two, 1, "split"),
        "ours-split-two-far-clip": ours(shape, two, FAR, "split"),
        "ours-split-ahead-two-clip": ours(shape, two, 1, "split", ahead_bytes=1 << 40),
        "ours-split-ahead-two-far-clip": ours(shape, two, FAR, "split", ahead_bytes=1 << 40),
        "ours-split-ahead-two-half-clip": ours(shape, two, 1, "split", ahead_bytes=1 << 40) | {"clips_each": 2},
        "ours-split8-clip": ours(shape, four, 1, "split8"),
        "ours-split8-one-clip": ours(shape, one, 1, "split8"),
        "zero2-one-clip": rival(shape, one, 1, "zero2"),
        "zero2-as-used-clip": rival(shape, four, 1, "zero2", **as_used),
        "fsdp2-one-clip": rival(shape, one, 1, "fsdp2"),
        "zero3-one-clip": rival(shape, one, 1, "zero3", compile=False),
        "trainstream-one-clip": rival(shape, one, 1, "trainstream", compile=False),
        "trainstream-four-clip": rival(shape, four, 1, "trainstream", compile=False),
        "roundpipe-four-clip": rival(shape, four, 1, "roundpipe", compile=False),
        **{name: rival(shape, cut, 1, "roundpipe", compile=False) for name, cut in finer.items()},
        "roundpipe-stale-four-clip": rival(shape, four, 1, "roundpipe", compile=False, stale=True),
        "zero2-bf16-one-clip": rival(shape, one, 1, "zero2-bf16"),
        "torchao-one": rival(shape, one, 0, "torchao"),
        "ours-fp32": ours(shape, four, 0, "fp32"),
        "ours-split8": ours(shape, four, 0, "split8"),
    }


def is_clipped(name: str) -> bool:
    """Whether a variant clips: those with something on NVMe do unless they say otherwise."""
    on_nvme = "nvme" in name or "half" in name
    return "-noclip" not in name and (on_nvme or name.endswith("-clip") or "-clip-" in name)


def is_base(name: str, other: str) -> bool:
    """Whether ratios of `other` are told against `name`: an exact system that is not ours, with the same clipping."""
    not_base = ("ours", "torchao", "zero2-bf16", "roundpipe-stale")
    is_exact_rival = not name.startswith(not_base)
    return is_exact_rival and is_clipped(name) == is_clipped(other)


def variants(shape: str, tokens: str | None) -> dict[str, dict[str, dict[str, Any]]]:
    """All groups."""
    t16, t4, one = tokens or "16k", tokens or "4k", tokens or "16k-mb16"
    deepspeed: dict[str, dict[str, Any]] = {}
    for clip, suffix in ((0, ""), (1, "-clip")):
        deepspeed[f"stock-ram{suffix}"] = stock(shape, t16, clip, "cpu")
        deepspeed[f"stock-ram-one{suffix}"] = stock(shape, one, clip, "cpu", chunked_loss=True)
        for states in ("fp32", "split8"):
            deepspeed[f"ours-{states}{suffix}"] = ours(shape, t16, clip, states)
            deepspeed[f"ours-{states}-one{suffix}"] = ours(shape, one, clip, states)
    all_nvme = {"nvme": True, "nvme_path": "@nvme", "state_ram_bytes": 0}
    nvme = {
        "stock-optimizer-nvme": stock(shape, t16, 1, "optimizer-nvme", uses_nvme=True),
        "ours-fp24m8-nvme": ours(shape, t16, 1, "fp24_m8", **all_nvme),
        "ours-split8-nvme": ours(shape, t16, 1, "split8", **all_nvme),
        "ours-split-nvme": ours(shape, t16, 1, "split", **all_nvme),
        "stock-optimizer-nvme-again": stock(shape, t16, 1, "optimizer-nvme", uses_nvme=True),  # a drive drifts
    }
    full8b = {
        f"ours-8b-{name.replace('_', '')}": ours("8b", t16, 0, name, activations="ram", gradient_bytes=2 << 30)
        for name in ("split8", "fp24_m8")
    }
    in_ram = {"activations": "ram", "tiling": "auto", "cuda_graphs": "off", "compile": "off"}

    def own(large: str) -> str:  # a dry run keeps its own shape
        return shape if shape == "tiny" else large

    tiles = {
        "ours-10b-2gb": ours(own("10b"), tokens or "half-k", 0, "split8", **in_ram, tile_bytes=32 << 20)
        | {"cap_gib": 0.95},
        "ours-64k-layer": ours(own("64k-layer"), tokens or "1k-one", 0, "fp24_m8", **in_ram) | {"cap_gib": 6.5},
    }
    in_rows = {"activations": "ram", "staging_bytes": (1 if shape == "tiny" else 44) << 30}
    long = {"ours-split-clip": ours(shape, tokens or "256k-one", 1, "split", **in_rows) | {"bound": True}}
    pinned_bytes = (1 if shape == "tiny" else 36) << 30
    mfu = {
        "ours-7b-split-clip": ours(
            own("7b"), tokens or "158k", 1, "split", activations="device", staging_bytes=pinned_bytes
        )
    }
    cut_16k = ("16k", "16k-mb16") if tokens is None else (tokens, tokens)
    cut_13k = ("13.5k", "13.5k-one") if tokens is None else (tokens, tokens)
    return {
        "rivals": rivals(shape, *(cut_13k if shape == "1.75b" else cut_16k)),
        "rivals4k": rivals(shape, t4, t4),
        "deepspeed": deepspeed,
        "nvme": nvme,
        "8b": full8b,
        "tiles": tiles,
        "mfu": mfu,
        "long": long,
    }
