"""A GPU asks the CPU and waits, in Triton. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl

ASK = tl.constexpr("""{
fence.acq_rel.sys;
st.release.sys.global.b64 [$1], $2;
mov.b64 $0, $2;
}""")
"""Writes to `asked` of the box, behind all that was written before."""
WAIT = tl.constexpr("""{
.reg .pred waits;
.reg .b64 seen;
again:
ld.acquire.sys.global.b64 seen, [$1+64];
setp.ne.b64 waits, seen, $2;
@waits bra again;
mov.b64 $0, seen;
}""")
"""Loop that reads the box until `answered` equals the number of the question."""


@triton.jit(do_not_specialize=["task"])
def ask(box, turn, task, WAITS: tl.constexpr):
    """Ask for a task: `box` in the CPU's RAM, `turn` [count, what was asked for] on the device. Runs as a single warp.
    `WAITS`: until it is answered."""
    at = tl.load(turn) + 1
    tl.debug_barrier()
    tl.store(turn, at)
    number = (at << 32) | task.to(tl.int64)
    tl.store(turn + 1, number)
    where = box.to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(ASK, "=l,l,l", [where, number], dtype=tl.int64, is_pure=False, pack=1)
    if WAITS:
        tl.inline_asm_elementwise(WAIT, "=l,l,l", [where, number], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def wait(box, turn):
    """Wait until what was asked for last is answered. Runs as a single warp."""
    where = box.to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(WAIT, "=l,l,l", [where, tl.load(turn + 1)], dtype=tl.int64, is_pure=False, pack=1)
