"""Child process that finds out how much pinned memory this machine grants, so that a refusal poisons nobody else.

Standard library only and started by its path (`pinned_grant.py` does), so that it comes up in a fraction of a second:

    python probe_pinned.py --libcudart /path/libcudart.so.13 --device 0 --pinned-bytes N --write-combined-bytes M

Algorithm: one mapping of N + M bytes is registered in steps of 256 MiB until CUDA refuses. Then, with everything
unregistered, the split that is to be used (scaled down alike where less was granted) is asked for in one piece each.
A line of JSON is printed after every stage, so that the parent knows what had been granted even if this process is
killed. Fields: granted_bytes (sum of the steps), pinned_bytes and write_combined_bytes (proven in one piece, both at
the same time), largest_piece_bytes (biggest single registration proven), reason and write_combined_reason (why not
more, empty when all was granted), error (CUDA could not start at all)."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import sys
from typing import Any

STEP_BYTES = 256 << 20
PAGE_BYTES = 4096
PORTABLE = 0x01
WRITE_COMBINED = 0x04


class Runtime:
    """libcudart through ctypes; every call returns an error text, empty on success."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        lib.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        lib.cudaHostUnregister.argtypes = [ctypes.c_void_p]
        lib.cudaHostAlloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint]
        lib.cudaFreeHost.argtypes = [ctypes.c_void_p]
        lib.cudaGetErrorString.argtypes = [ctypes.c_int]
        lib.cudaGetErrorString.restype = ctypes.c_char_p

    def start(self, device: int) -> str:
        return self._text(self._lib.cudaSetDevice(device)) or self._text(self._lib.cudaFree(None))

    def register(self, address: int, n_bytes: int) -> str:
        return self._text(self._lib.cudaHostRegister(address, n_bytes, PORTABLE))

    def unregister(self, address: int) -> str:
        return self._text(self._lib.cudaHostUnregister(address))

    def alloc_write_combined(self, n_bytes: int) -> tuple[int, str]:
        pointer = ctypes.c_void_p()
        text = self._text(self._lib.cudaHostAlloc(ctypes.byref(pointer), n_bytes, PORTABLE | WRITE_COMBINED))
        return pointer.value or 0, text

    def free_write_combined(self, address: int) -> str:
        return self._text(self._lib.cudaFreeHost(address))

    def _text(self, code: int) -> str:
        if code == 0:
            return ""
        self._lib.cudaGetLastError()
        text = self._lib.cudaGetErrorString(code)
        return f"{text.decode() if text else 'unknown error'} (CUDA error {code})"


def probe(runtime: Any, pinned_bytes: int, write_combined_bytes: int, step_bytes: int, report: Any) -> None:
    """Walks the stages on `runtime` (a `Runtime`, or a fake in tests); calls report(dict) after each."""
    asked_bytes = pinned_bytes + write_combined_bytes
    found = {
        "granted_bytes": 0,
        "pinned_bytes": 0,
        "write_combined_bytes": 0,
        "largest_piece_bytes": 0,
        "reason": "",
        "write_combined_reason": "",
        "error": "",
    }
    try:
        mapping = mmap.mmap(-1, asked_bytes)
    except OSError as error:
        report({**found, "reason": f"the operating system refused to map {asked_bytes} bytes: {error}"})
        return
    base_address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages pins small ones
            mapping.madvise(mmap.MADV_HUGEPAGE)
    registered = []
    while found["granted_bytes"] < asked_bytes:
        n_bytes = min(step_bytes, asked_bytes - found["granted_bytes"])
        address = base_address + found["granted_bytes"]
        found["reason"] = runtime.register(address, n_bytes)
        if found["reason"]:
            break
        registered.append(address)
        found["granted_bytes"] += n_bytes
        found["largest_piece_bytes"] = max(found["largest_piece_bytes"], n_bytes)
        report(found)
    for address in registered:
        runtime.unregister(address)

    scale = found["granted_bytes"] / asked_bytes
    want_pinned = int(pinned_bytes * scale) // PAGE_BYTES * PAGE_BYTES
    want_combined = int(write_combined_bytes * scale) // PAGE_BYTES * PAGE_BYTES
    if want_pinned:
        text = runtime.register(base_address, want_pinned)
        if text:
            found["reason"] = found["reason"] or f"{want_pinned} bytes in one piece: {text}"
        else:
            found["pinned_bytes"] = want_pinned
            found["largest_piece_bytes"] = max(found["largest_piece_bytes"], want_pinned)
        report(found)
    if want_combined:
        address, text = runtime.alloc_write_combined(want_combined)
        found["write_combined_reason"] = text
        if not text:
            found["write_combined_bytes"] = want_combined
            runtime.free_write_combined(address)
    if found["pinned_bytes"]:
        runtime.unregister(base_address)
    report(found)


def _print(found: dict) -> None:
    print(json.dumps(found), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="how much pinned memory does this machine grant")
    parser.add_argument("--libcudart", required=True, help="path of the CUDA runtime library")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--pinned-bytes", type=int, required=True)
    parser.add_argument("--write-combined-bytes", type=int, default=0)
    parser.add_argument("--step-bytes", type=int, default=STEP_BYTES)
    args = parser.parse_args(arguments)
    try:
        runtime = Runtime(ctypes.CDLL(args.libcudart))
        error = runtime.start(args.device)
    except (OSError, AttributeError) as missing:
        error = str(missing)
        runtime = None
    if error:
        _print({"error": f"CUDA did not start in the probing process: {error}"})
        return 1
    probe(runtime, args.pinned_bytes, args.write_combined_bytes, args.step_bytes, _print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
