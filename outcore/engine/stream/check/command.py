"""`outcore models [NAME ...]`: what each architecture can do, as it was tried; with --try it is tried now.

The table comes with the package (`architectures.json`), written by `benchmarks/zoo/zoo_table.py` from a run over every
causal architecture of transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from outcore.common.words import did_you_mean
from outcore.config.commands import models_flags

TABLE = Path(__file__).with_name("architectures.json")
COLUMNS = ("streams", "types", "packing", "lora", "tiles")
LABELS = {
    "streams": "streams",
    "why": "why not",
    "types": "weights in",
    "packing": "packed rows",
    "lora": "LoRA",
    "tiles": "in tiles",
    "equal": "three steps and the export equal plain PyTorch",
    "routers": "with its balancing loss",
}


def main(argv: list[str] | None = None) -> int:
    """Print the table, or what is known of the architectures named; 2 for one that is not known."""
    args = models_flags().parse_args(argv)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    known: dict[str, dict[str, str]] = table["architectures"]
    if not args.names:
        print(f"Tried with {table['tried_with']}. `outcore models NAME` tells more; docs/models.md explains.\n")
        print(f"{'architecture':<28}{'streams':<10}{'weights in':<31}{'packed':<10}{'LoRA':<6}tiles")
        for name, row in known.items():
            short = [row.get(column, "").partition(":")[0] for column in COLUMNS]
            print(f"{name:<28}{short[0]:<10}{short[1]:<31}{short[2]:<10}{short[3]:<6}{short[4]}".rstrip())
        return 0
    for name in args.names:
        if name not in known and not args.try_now:
            print(
                f"outcore models: {name!r} was not tried.{did_you_mean(name, known)} A model_type is meant, as in a "
                "model's config.json; --try tries one that this transformers knows.",
                file=sys.stderr,
            )
            return 2
        print(name)
        for key, value in (_tried(name) if args.try_now else known[name]).items():
            print(f"  {LABELS.get(key, key)}: {value}")
        if known.get(name, {}).get("streams") == "no":
            print("  what happens then: --engine auto trains it with DeepSpeed's engine")
    return 0


def _tried(name: str) -> dict[str, Any]:
    from outcore.engine.stream.check.gradients import why_config_not_trained
    from outcore.flow.check import config_of_type

    try:
        config = config_of_type(name)
    except Exception as error:  # an unknown type, or a config class whose defaults do not fit together
        return {"streams": "not tried", "why": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    why = why_config_not_trained(config)
    return {"streams": "no", "why": why} if why else {"streams": "yes"}
