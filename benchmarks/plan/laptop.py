"""The race's rows on the reference laptop, by forecast: the table of docs/race.md between its markers.

    python benchmarks/plan/laptop.py            (writes it)
    python benchmarks/plan/laptop.py --check    (exit code 1 when it is not what the planner says now)

Each row is planned in the cut of its step (rows of a micro-batch) that is forecast fastest. What a row gains is planned
in the same cut and with the same homes, one thing changed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plan_race import race_shape

from outcore.common.quantities import GB, GIB
from outcore.plan import Hardware, ModelShape, Plan, RunRequest, load_hardware, preset_shape
from outcore.plan import constants as k
from outcore.plan.answer.advice import shortage_words
from outcore.plan.answer.guide import GuideState, document_state
from outcore.plan.choose import MICRO_BATCHES, STREAMED, best_stream
from outcore.plan.record import AHEAD, STAYING
from outcore.plan.run.forecast import NEARLY_EQUAL
from outcore.plan.stream.forecast import plan_stream
from outcore.plan.stream.memory import TILES
from outcore.sizing.layouts import StreamLayout

MACHINE = "rtx4070-laptop"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/race.md"
BEGIN, END = "<!-- begin: benchmarks/plan/laptop.py -->", "<!-- end: benchmarks/plan/laptop.py -->"
LOSSLESS = RunRequest(engine="stream", checkpoints_elsewhere=True)
"""Clipping at 1.0, masters in two halves and moments in fp32; checkpoints on another drive."""
LONG = 32768
"""Tokens of a row from which on all of a layer but attention runs in tiles of tokens."""
FEWER_BITS_RATE = 2.0
"""Products in float8, or of fp16 summed in fp16, beside bf16 summed in fp32: NVIDIA's Ada architecture paper (an RTX
4090: 330 and 330 beside 165 TFLOPS)."""
BINDS = {
    "compute_s": "arithmetic",
    "h2d_s": "link",
    "d2h_s": "link",
    "drive_s": "drive",
    "cpu_optimizer_s": "RAM: updates, copies",
    "host_overhead_s": "launches",
}


class Work(NamedTuple):
    """A row of the race."""

    words: str
    shape: ModelShape
    rows: int
    """Of a step."""
    seq_length: int
    request: RunRequest


def full(words: str, name: str, rows: int, seq_length: int = 1024, request: RunRequest = LOSSLESS) -> Work:
    """Full training of one of the race's shapes."""
    return Work(words, race_shape(name, seq_length), rows, seq_length, request)


def lora(words: str, preset: str, rows: int, seq_length: int = 1024, *, quantize: str = "nf4") -> Work:
    """Adapters of rank 16 on every linear layer; gpt-oss as it is published."""
    published = "mxfp4" if quantize == "mxfp4" else None
    shape = preset_shape(preset).with_lora(16).packed(quantize, published=published)
    return Work(words, shape, rows, seq_length, LOSSLESS)


def works() -> list[Work]:
    """Every measured row of the race that one GPU and its host can be asked for."""
    eight = replace(LOSSLESS, state_format="split8", max_grad_norm=0.0)
    on_drive = replace(LOSSLESS, residency="nvme")
    return [
        full("1.2 B, 16,384 tokens", "1.2b", 16),
        full("1.2 B, 4,096 tokens", "1.2b", 4),
        full("1.75 B, 13,824 tokens", "1.75b", 27, 512),
        full("1.75 B, 4,096 tokens", "1.75b", 4),
        full("2.8 B, 16,384 tokens", "2.8b", 16),
        full("2.8 B, 4,096 tokens", "2.8b", 4),
        full("8 B, 16,384 tokens", "8b", 16),
        full("8 B, 16,384 tokens, 8-bit moments, no clipping", "8b", 16, request=eight),
        full("1.2 B, 16,384 tokens, all on NVMe", "1.2b", 16, request=on_drive),
        full("the same, `fp24_m8`", "1.2b", 16, request=replace(on_drive, state_format="fp24_m8")),
        full("7 B (Qwen2.5's shape), 161,792 tokens", "7b", 158),
        full("1.2 B, one row of 262,144 tokens", "1.2b", 1, 262144),
        lora("LoRA, 8 B in NF4, 4,096 tokens", "llama-8b", 4),
        lora("LoRA, 8 B in NF4, 8,192 tokens", "llama-8b", 8),
        lora("LoRA, 32 B in NF4, 4,096 tokens", "qwen3-32b", 4),
        lora("LoRA, 33 B in 16 bits, 16,384 tokens", "qwen3-32b", 8, 2048, quantize=""),
        lora("LoRA, 70 B in NF4, 1,024 tokens", "llama-70b", 1),
        lora("LoRA, 70 B in NF4, 8,192 tokens", "llama-70b", 8),
        lora("LoRA, gpt-oss 120 B in MXFP4, 1,024 tokens", "gpt-oss-120b", 1, quantize="mxfp4"),
        lora("LoRA, 8 B in 16 bits, one row of 32,768 tokens", "llama-8b", 1, 32768, quantize=""),
        lora("LoRA, 8 B in NF4, one row of 131,072 tokens", "llama-8b", 1, 131072),
    ]


def best_cut(work: Work, hardware: Hardware) -> Plan:
    """The plan of the fastest cut; of nearly equal ones that nearest to the usual micro-batch."""
    plans = [in_cut(work, hardware, micro) for micro in MICRO_BATCHES if work.rows % micro == 0]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return min(plans, key=lambda plan: plan.shortage)
    limit_s = NEARLY_EQUAL * min(plan.time.step_s for plan in fitting)
    near = [plan for plan in fitting if plan.time.step_s <= limit_s]
    return min(near, key=lambda plan: abs(plan.micro_batch - k.DEFAULT_MICRO_BATCH))


def in_cut(work: Work, hardware: Hardware, micro: int, **changed: str) -> Plan:
    """The best plan of micro-batches of `micro` rows; `changed`: what the run asks for otherwise."""
    request = replace(work.request, micro_batch=micro, accumulation=work.rows // micro, **changed)
    return best_stream(work.shape, request, hardware, work.seq_length)


def idle_used(work: Work, plan: Plan, hardware: Hardware, resident: int | None) -> Plan:
    """The plan with another use of idle GPU memory, all else the same."""
    home = {"VRAM": "vram", "RAM": "ram", "NVMe": "nvme"}[plan.homes["activation checkpoints"]]
    layout = StreamLayout(
        plan.micro_batch, plan.accumulation, home, tiling=plan.tiling, residency=STREAMED[work.request.residency],
        resident_bytes=resident,
    )  # fmt: skip
    request = replace(work.request, micro_batch=plan.micro_batch, accumulation=plan.accumulation)
    return plan_stream(work.shape, request, hardware, work.seq_length, layout)


def gains(work: Work, plan: Plan, hardware: Hardware) -> list[str]:
    """Seconds of a step with one thing changed, a cell each."""
    micro, is_full = plan.micro_batch, not work.shape.lora_r
    is_lossless = is_full and work.request.state_format is None
    cells = [f"{plan.time_whole.step_s:.3g}, {plan.part_bytes('ram', AHEAD) / GIB:.1f}" if plan.time_whole else ""]
    cells.append(seconds(idle_used(work, plan, hardware, 0)) if plan.part_bytes("vram", STAYING) else "none stays")
    cells.append(seconds(in_cut(work, hardware, micro, state_format="split8")) if is_lossless else "")
    takes_muon = is_lossless and work.seq_length < LONG
    muon = in_cut(work, hardware, micro, optimizer="muon") if takes_muon else None
    cells.append("" if muon is None else seconds(muon))
    fast = replace(hardware, compute_tflops=FEWER_BITS_RATE * (hardware.compute_tflops or 0.0))
    in_tiles = plan.part_bytes("vram", TILES) > 0 or work.seq_length >= LONG
    return [*cells, "refused" if in_tiles else f"> {seconds(in_cut(work, fast, micro))}"]


def seconds(plan: Plan) -> str:
    """A step's, or that it does not fit."""
    return f"{plan.time.step_s:.3g}" if plan.fits else "does not fit"


def line(work: Work, hardware: Hardware) -> str:
    """A row of the table."""
    plan = best_cut(work, hardware)
    if not plan.fits:
        return f"| {work.words} | does not fit: {shortage_words(plan)} | | | | | | | | | |"
    on_drive = sum(p.size_bytes for p in plan.parts if p.tier == "nvme")
    cells = [
        f"{work.words}, {plan.accumulation} x {plan.micro_batch}",
        seconds(plan),
        BINDS[plan.time.longest],
        f"{plan.used_bytes('vram') / GIB:.1f}",
        f"{(plan.tier('ram').used_bytes - plan.part_bytes('ram', AHEAD)) / GIB:.1f}",
        f"{on_drive / GB:.0f}" if on_drive else "",
        *gains(work, plan, hardware),
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """What stands between the markers."""
    hardware = load_hardware(MACHINE)
    head = [
        "what, micro-batches x rows", "s/step", "longest term", "VRAM, GiB", "RAM, GiB", "NVMe, GB",
        "nothing clipped, GiB more", "no layer stays", "8-bit moments", "Muon",
        "float8, or sums in fp16",
    ]  # fmt: skip
    rule = "|---|---:|---|" + "---:|" * (len(head) - 3)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(line(work, hardware) for work in works())])


def state() -> GuideState:
    """Whether the document has today's table."""
    return document_state(DOCUMENT, table(), BEGIN, END)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, found = parser.parse_args().check, state()
    if not check:
        DOCUMENT.write_text(found.text, encoding="utf-8")
    return int(check and not found.is_current)


if __name__ == "__main__":
    sys.exit(main())
