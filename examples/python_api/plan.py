"""Will it fit, and how fast: `python examples/python_api/plan.py MODEL`. Loads nothing of the model."""

import sys

import outcore

laptop = "rtx4070-laptop"  # leave machine out: this one, as gds_optimizer.py measured it
for rank in (0, 16):
    found = outcore.plan(sys.argv[1], lora_r=rank, machine=laptop)
    vram_gib = found.bytes["vram"] / 2**30
    print(f"rank {rank}: fits {found.fits}, {vram_gib:.1f} GiB of VRAM, {found.seconds:.2f} s a step")
print(outcore.plan(sys.argv[1], infer=True, quantize="nf4", machine=laptop))
