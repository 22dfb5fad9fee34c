"""Bytes that torch's allocator gives while something runs."""

import gc

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function) -> int:
    """Most bytes of torch's allocator above those at the start. What others left is collected before: it would be freed
    meanwhile, and hide as many bytes."""
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            function()
    finally:
        gc.enable()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
