"""What bitsandbytes makes of some values, recorded: it takes two seconds to import, and peft imports it where it is
installed. `python -m tests.formats.bitsandbytes` records again, with the bitsandbytes that is there."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RECORD = Path(__file__).with_name("bitsandbytes.safetensors")


def recorded(name: str) -> dict[str, torch.Tensor]:
    """The tensors of one case by their names."""
    return {key[len(name) + 1 :]: t for key, t in load_file(RECORD).items() if key.startswith(f"{name}/")}


def record() -> None:
    from bitsandbytes import functional

    torch.manual_seed(0)
    found = {}
    for name, rows, nested in (("plain", 32, False), ("nested", 32, True), ("ours", 16, False)):
        value = torch.randn(rows, 64 if rows == 32 else 128, dtype=torch.bfloat16)
        value[0, :64] = 0
        given = value.float() if name == "ours" else value
        codes, state = functional.quantize_4bit(given, blocksize=64, compress_statistics=nested, quant_type="nf4")
        parts = {"value": value, "codes": codes, "absmax": state.absmax}
        parts |= {f"state/{key}": part for key, part in state.as_dict(packed=True).items()}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            state.dtype = dtype
            parts[str(dtype).removeprefix("torch.")] = functional.dequantize_4bit(codes, state)
        found |= {f"{name}/{key}": part.clone() for key, part in parts.items()}
    save_file(found, RECORD)


if __name__ == "__main__":
    record()
