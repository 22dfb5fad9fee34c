"""A GPU asks the CPU and waits, in Triton. Imported on a GPU only."""

from __future__ import annotations

import triton
import triton.language as tl

ASK_AND_WAIT = tl.constexpr("""{
.reg .pred waits;
.reg .b64 seen;
fence.acq_rel.sys;
st.release.sys.global.b64 [$1], $2;
again:
ld.acquire.sys.global.b64 seen, [$1+64];
setp.ne.b64 waits, seen, $2;
@waits bra again;
mov.b64 $0, seen;
}""")
"""Writes to `asked` of the box, behind all that was written before; reads `answered` until it has the same number."""


@triton.jit(do_not_specialize=["task"])
def ask(box, turn, task):
    """Ask for a task: `box` in the CPU's RAM, `turn` [1] on the device. Runs as a single warp."""
    at = tl.load(turn) + 1
    tl.debug_barrier()
    tl.store(turn, at)
    number = (at << 32) | task.to(tl.int64)
    where = box.to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(ASK_AND_WAIT, "=l,l,l", [where, number], dtype=tl.int64, is_pure=False, pack=1)
