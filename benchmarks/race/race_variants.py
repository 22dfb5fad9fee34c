"""Variants of `stream_race.py` by group: ours, stock DeepSpeed, the prototype, rivals; each as its child takes it."""

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
    "512k": {"mb": 16, "seq": 1024, "gas": 32},
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
"""Stock DeepSpeed's best of --group sweep: 2.95 s a step where the others took 3.30 to 4.01
(results/stream_race-h200-sweep.json)."""


def ours(shape: str, tokens: str, clip: float, states: str, **more: Any) -> dict[str, Any]:
    """A variant of the streaming engine."""
    on_nvme = more.pop("nvme", False)
    settings = {"max_grad_norm": clip, "states": states} | more
    return {"child": "race_ours.py", "shape": shape, **TOKENS[tokens], "settings": settings, "uses_nvme": on_nvme}


def stock(shape: str, tokens: str, clip: float, where: str, **more: Any) -> dict[str, Any]:
    """A variant of DeepSpeed as it is, or of plain torch."""
    uncapped = where in ("none", "plain")
    settings = BEST_OF_SWEEP | {"clip": clip, "where": where} | more
    return {"child": "race_stock.py", "shape": shape, **TOKENS[tokens], **settings} | (
        {"cap_gib": 0} if uncapped else {}
    )


def prototype(
    shape: str, tokens: str, states: str, *, defer: bool, compiled: bool = True, checkpoints: str = "gpu", **env: Any
) -> dict[str, Any]:
    """A variant of the prototype. `checkpoints`: gpu, or cpu (in RAM, as ours are where they do not fit 3.5 GB)."""
    sizes = {"1.2b": {"H": 2048, "L": 24}, "2.8b": {"H": 3072, "L": 26}}[shape]
    sizes |= {"GAS": TOKENS[tokens]["gas"], "VAR": states, "POL": "defer" if defer else "prio", "CK": checkpoints}
    sizes |= {"COMP": 1, "VJP": 1} if compiled else {}
    return {"child": "prototype", "env": sizes | env, **TOKENS[tokens]}


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
        "zero3-deepcompile-one-clip": rival(shape, one, 1, "zero3-deepcompile", compile=False),
        "zero3-deepcompile-four-clip": rival(shape, four, 1, "zero3-deepcompile", compile=False),
        "superoffload-one-clip": rival(shape, one, 1, "superoffload", compile=False),
        "superoffload-two-clip": rival(shape, two, 1, "superoffload", compile=False),
        "superoffload-four-clip": rival(shape, four, 1, "superoffload", compile=False),
        "trainstream-one-clip": rival(shape, one, 1, "trainstream", compile=False),
        "trainstream-four-clip": rival(shape, four, 1, "trainstream", compile=False),
        "roundpipe-four-clip": rival(shape, four, 1, "roundpipe", compile=False),
        **{name: rival(shape, cut, 1, "roundpipe", compile=False) for name, cut in finer.items()},
        "roundpipe-stale-four-clip": rival(shape, four, 1, "roundpipe", compile=False, stale=True),
        "zenflow-one-clip": rival(shape, one, 1, "zenflow"),
        "zero2-bf16-one-clip": rival(shape, one, 1, "zero2-bf16"),
        "torchao-one": rival(shape, one, 0, "torchao"),
        "superoffload-one": rival(shape, one, 0, "superoffload", compile=False),
        "superoffload-four": rival(shape, four, 0, "superoffload", compile=False),
        "ours-fp32": ours(shape, four, 0, "fp32"),
        "ours-split8": ours(shape, four, 0, "split8"),
    }


def is_clipped(name: str) -> bool:
    """Whether a variant clips: those with something on NVMe do unless they say otherwise."""
    on_nvme = "nvme" in name or "half" in name
    return "-noclip" not in name and (on_nvme or name.endswith("-clip") or "-clip-" in name)


def is_base(name: str, other: str) -> bool:
    """Whether ratios of `other` are told against `name`: an exact system that is not ours, with the same clipping."""
    not_base = ("ours", "proto", "plain", "torchao", "zero2-bf16", "roundpipe-stale", "zenflow")
    is_exact_rival = not name.startswith(not_base)
    return is_exact_rival and is_clipped(name) == is_clipped(other)


def variants(shape: str, tokens: str | None) -> dict[str, dict[str, dict[str, Any]]]:
    """All groups."""
    t16, t4 = tokens or "16k", tokens or "4k"
    ram = {
        "stock-ram": stock(shape, t16, 0, "cpu"),
        "stock-ram-clip": stock(shape, t16, 1, "cpu"),
        "zero2-clip": stock(shape, t16, 1, "none"),
        "plain-eager": stock(shape, t16, 0, "plain"),
        "plain-compiled": stock(shape, t16, 0, "plain", compile=True),
        "ours-fp32": ours(shape, t16, 0, "fp32"),
        "ours-fp32-clip": ours(shape, t16, 1, "fp32"),
        "ours-split-clip": ours(shape, t16, 1, "split"),
        "ours-split8-clip": ours(shape, t16, 1, "split8"),
        "ours-fp32-eager": ours(shape, t16, 0, "fp32", compile="off"),
        "ours-fp32-eager-nographs": ours(shape, t16, 0, "fp32", compile="off", cuda_graphs="off"),
        "ours-fp32-clip-4gib": ours(shape, t16, 1, "fp32", staging_bytes=4 << 30),
        "ours-fp32-clip-1gib": ours(shape, t16, 1, "fp32", staging_bytes=1 << 30),
        "ours-fp32-12threads": ours(shape, t16, 0, "fp32", optimizer_threads=12),
        "ours-fp32-actdevice": ours(shape, t16, 0, "fp32", activations="device"),
        "ours-fp32-clip-actdevice": ours(shape, t16, 1, "fp32", activations="device"),
    }
    if shape == "1.2b":
        ram |= {
            "proto-fp32": prototype(shape, t16, "fp32", defer=False),
            "proto-fp32-clip": prototype(shape, t16, "fp32", defer=True),
            "proto-split8-clip": prototype(shape, t16, "split8", defer=True),
            "proto-fp32-eager": prototype(shape, t16, "fp32", defer=False, compiled=False),
            "proto-fp32-eager-actram": prototype(shape, t16, "fp32", defer=False, compiled=False, checkpoints="cpu"),
            "proto-fp32-actram": prototype(shape, t16, "fp32", defer=False, checkpoints="cpu"),
            "proto-fp32-clip-actram": prototype(shape, t16, "fp32", defer=True, checkpoints="cpu"),
            "proto-split8-clip-actram": prototype(shape, t16, "split8", defer=True, checkpoints="cpu"),
        }
    ram4k = {
        "stock-ram": stock(shape, t4, 0, "cpu"),
        "stock-ram-clip": stock(shape, t4, 1, "cpu"),
        "ours-fp32": ours(shape, t4, 0, "fp32"),
        "ours-fp32-clip": ours(shape, t4, 1, "fp32"),
        "ours-split": ours(shape, t4, 0, "split"),
        "ours-split-clip": ours(shape, t4, 1, "split"),
        "ours-split8": ours(shape, t4, 0, "split8"),
        "ours-split8-clip": ours(shape, t4, 1, "split8"),
        "ours-fp24m8": ours(shape, t4, 0, "fp24_m8"),
        "ours-fp32-actdevice": ours(shape, t4, 0, "fp32", activations="device"),
        "ours-split8-16threads": ours(shape, t4, 0, "split8", optimizer_threads=16),
    }
    if shape == "1.2b":
        ram4k |= {
            "proto-fp32": prototype(shape, t4, "fp32", defer=False),
            "proto-split8": prototype(shape, t4, "split8", defer=False),
        }
    sweep = {
        f"stock-ram-sg{sub:.0e}-pf{prefetch:.0e}-live{live:.0e}": stock(
            shape, t16, 0, "cpu", sub_group=sub, prefetch=prefetch, live=live
        )
        for sub, prefetch, live in ((1e8, 5e7, 3e8), (1e9, 5e7, 3e8), (1e8, 2e8, 1e9), (3e7, 5e7, 1e9), (1e9, 5e8, 1e9))
    }
    cuts = ("16k", "16k-mb8", "16k-mb16") if tokens is None else (tokens,)
    one = cuts[-1]
    cuts_of_stock = {
        f"stock-{cut}{'-chunked' * chunked}": stock(shape, cut, 0, "cpu", chunked_loss=chunked)
        for cut in cuts
        for chunked in (False, True)
    }
    # unfragmented, so that more rows fit under the cap
    cuts_of_stock |= {
        f"stock-{cut}-expandable{'-clip' * bool(clip)}": stock(
            shape, cut, clip, "cpu", allocator="expandable_segments:True"
        )
        for cut in cuts
        for clip in (0, 1)
    }
    cuts_of_stock |= {
        f"stock-{one}-chunked-sg{sub:.0e}-pf{prefetch:.0e}": stock(
            shape, one, 0, "cpu", chunked_loss=True, sub_group=sub, prefetch=prefetch
        )
        for sub, prefetch in ((1e8, 5e7), (1e8, 2e8), (1e9, 2e8))
    }
    best_cuts = {}
    for clip, suffix in ((0, ""), (1, "-clip")):
        best_cuts[f"stock-ram{suffix}"] = stock(shape, t16, clip, "cpu")
        best_cuts[f"stock-ram-one{suffix}"] = stock(shape, one, clip, "cpu", chunked_loss=True)
        for states in ("fp32", "split8"):
            best_cuts[f"ours-{states}{suffix}"] = ours(shape, t16, clip, states)
            best_cuts[f"ours-{states}-one{suffix}"] = ours(shape, one, clip, states)
            if shape == "1.2b":
                name = f"proto-{states}{suffix}-actram"
                best_cuts[name] = prototype(shape, t16, states, defer=bool(clip), checkpoints="cpu")
    all_nvme = {"nvme": True, "nvme_path": "@nvme", "state_ram_bytes": 0}
    nvme = {
        "stock-optimizer-nvme": stock(shape, t16, 1, "optimizer-nvme", uses_nvme=True),
        "stock-optimizer-nvme-again": stock(shape, t16, 1, "optimizer-nvme", uses_nvme=True),  # a drive drifts
        "ours-fp32-nvme": ours(shape, t16, 1, "fp32", **all_nvme),
        "ours-split-nvme": ours(shape, t16, 1, "split", **all_nvme),
        "ours-split-nvme-plain": ours(shape, t16, 1, "split", **all_nvme, compress_on_nvme=False),
        "ours-split8-nvme": ours(shape, t16, 1, "split8", **all_nvme),
        "ours-fp24m8-nvme": ours(shape, t16, 1, "fp24_m8", **all_nvme),
        "ours-fp24m8-nvme-24slots": ours(shape, t16, 1, "fp24_m8", **all_nvme, state_ring_slots=24),
        "stock-optimizer-nvme-noclip": stock(shape, t16, 0, "optimizer-nvme", uses_nvme=True),
        "ours-split-nvme-noclip": ours(shape, t16, 0, "split", **all_nvme),
        "ours-split8-nvme-noclip": ours(shape, t16, 0, "split8", **all_nvme),
        "ours-fp24m8-nvme-noclip": ours(shape, t16, 0, "fp24_m8", **all_nvme),
        "ours-fp32-half": ours(shape, t16, 1, "fp32", **(all_nvme | {"state_ram_bytes": "@half"})),
        "ours-fp32-nvme-third": ours(shape, t16, 1, "fp32", **(all_nvme | {"state_ram_bytes": "@third"})),
        "ours-split8-nvme-third": ours(shape, t16, 1, "split8", **(all_nvme | {"state_ram_bytes": "@third8"})),
        "ours-all-nvme": ours(shape, t16, 1, "split8", **all_nvme, weight_ram_bytes=0),
        "ours-all-fp24m8-nvme": ours(shape, t16, 1, "fp24_m8", **all_nvme, weight_ram_bytes=0),
        # weights that stay for reuse keep their swap buffers: "Not enough buffers 0 for swapping 1"
        "stock-all-nvme": stock(shape, t16, 1, "nvme", uses_nvme=True, live=0),
    }
    big = {
        "stock-ram": stock("2.8b", t16, 0, "cpu"),
        "stock-ram-clip": stock("2.8b", t16, 1, "cpu"),
        "ours-fp32": ours("2.8b", t16, 0, "fp32"),
        "ours-fp32-clip": ours("2.8b", t16, 1, "fp32"),
        "ours-split8-clip": ours("2.8b", t16, 1, "split8"),
    }
    full8b = {
        f"ours-8b-{name.replace('_', '')}": ours("8b", t16, 0, name, activations="ram", gradient_bytes=2 << 30)
        for name in ("split8", "fp24_m8")
    }
    idle = {
        f"ours-{states}{suffix}": ours(shape, t16, clip, states, resident_bytes=0)
        | {"turns": {"stay": {"resident_bytes": None}}, "turn_warm": 5}
        for states in ("fp32", "split")
        for clip, suffix in ((1, "-clip"), (0, ""))
    }
    float8 = {
        f"ours-{name}-clip": ours(shape, t16, 1, "fp32", matmul=name) | {"kernels": 40}
        for name in ("same", "float8_tensorwise", "float8_rowwise")
    }
    eager = {"compile": "off"}  # on both sides: compiling takes a minute and is not what is asked here
    in_ram = {"activations": "ram", "tiling": "auto", "cuda_graphs": "off", **eager}

    def own(large: str) -> str:  # a dry run keeps its own shape
        return shape if shape == "tiny" else large

    expectations = {
        f"{name}-{cut}-clip": variant
        for cut in dict.fromkeys((tokens or "512k", t16))
        for name, variant in {
            "zero2-resident": rival(shape, cut, 1, "zero2-resident", cap_gib=0, compile=False),
            "ours-split": ours(shape, cut, 1, "split", **eager),
            "ours-split-infinity-nvme": ours(shape, cut, 1, "split", **all_nvme, **eager, weight_ram_bytes=0),
        }.items()
    }
    expectations |= {
        "ours-10b-2gb": ours(own("10b"), tokens or "half-k", 0, "split8", **in_ram, tile_bytes=32 << 20)
        | {"cap_gib": 0.95},
        "ours-64k-layer": ours(own("64k-layer"), tokens or "1k-one", 0, "fp24_m8", **in_ram) | {"cap_gib": 6.5},
    }
    all_pinned = {"staging_bytes": (1 if shape == "tiny" else 16) << 30}  # as a run takes by itself with this much RAM
    muon = {
        f"ours-{states}-{optimizer}{suffix}": ours(shape, t16, clip, states, optimizer=optimizer, **all_pinned)
        for clip, suffix in ((1, "-clip"), (0, ""))
        for states in ("split", "fp32")
        for optimizer in ("adamw", "muon")
    }
    in_rows = {"activations": "ram", "staging_bytes": (1 if shape == "tiny" else 44) << 30}
    long = {
        f"ours-{states}-clip": ours(shape, tokens or "256k-one", 1, states, **in_rows) | {"bound": True}
        for states in ("split", "fp32")
    }
    mfu = {
        f"ours-7b-{states}{suffix}": ours(
            "tiny" if shape == "tiny" else "7b", tokens or "158k", clip, states, activations="device",
            staging_bytes=(1 if shape == "tiny" else 36) << 30,
        )
        for states in ("split", "split8")
        for clip, suffix in ((1, "-clip"), (0, ""))
    }  # fmt: skip
    cut_16k = ("16k", "16k-mb16") if tokens is None else (tokens, tokens)
    cut_13k = ("13.5k", "13.5k-one") if tokens is None else (tokens, tokens)
    return {
        "rivals": rivals(shape, *(cut_13k if shape == "1.75b" else cut_16k)),
        "rivals4k": rivals(shape, tokens or "4k", tokens or "4k"),
        "ram": ram,
        "ram4k": ram4k,
        "sweep": sweep,
        "cuts": cuts_of_stock,
        "best-cuts": best_cuts,
        "nvme": nvme,
        "big": big,
        "8b": full8b,
        "idle": idle,
        "expectations": expectations,
        "float8": float8,
        "muon": muon,
        "mfu": mfu,
        "long": long,
    }
