"""What the children of `stream_race.py` share: shapes, tokens, the memory of this process, the result line.

A child trains on random tokens with randomly filled weights: only speed and memory are compared here, losses are
compared by `stream_exact.py`. Every child measures its own peak on the device as the driver sees
it (used minus what was used before the child touched the device), so it must be alone there.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES = {  # hidden size, layers, intermediate size, heads, key/value heads, vocabulary
    "tiny": (64, 3, 176, 4, 1, 320),
    "1.2b": (2048, 24, 5632, 16, 4, 32000),
    "1.75b": (2560, 24, 6912, 20, 5, 32000),
    "2.8b": (3072, 26, 8448, 24, 6, 32000),
    "7b": (3584, 28, 18944, 28, 4, 152064),
    "8b": (4096, 32, 14336, 32, 8, 128256),
    "10b": (4096, 45, 14336, 32, 8, 32000),
    "64k-layer": (65536, 1, 4096, 512, 8, 2048),
}
"""Llama shapes, untied. 1.2b: 24 layers of 2048; 7b: Qwen2.5 7B's; 8b: Llama 3 8B; 64k-layer:
two matrices of 65,536 x 65,536 and little else, 9.8 B parameters."""
FILL_VALUES, FILL_STEP = 1 << 27, 15_485_863
"""Random values in all, as a weight may be larger than the allocator's cap; how much further each matrix begins."""


def config_of(shape: str, seq_length: int) -> Any:
    """The transformers configuration of a shape."""
    from transformers import LlamaConfig

    hidden, layers, intermediate, heads, kv_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=max(seq_length, 2048),
        tie_word_embeddings=False,
    )
    config.use_cache = False
    config._attn_implementation = "sdpa"
    return config


def token_batches(options: dict[str, Any], device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Micro-batches of one step."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = config_of(options["shape"], options["seq"]).vocab_size
    shape = (options["mb"], options["seq"])
    ids = [torch.randint(0, vocabulary, shape, generator=generator).to(device) for _ in range(options["gas"])]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]


def free_port() -> str:
    """A port for processes of this host that look for each other."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def cap_allocator(cap_gib: float, gpu: int | None = None) -> None:
    """Let torch's allocator have at most this much of a GPU (None: the current one)."""
    if cap_gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(gpu).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * 2**30 / total, gpu)


def rss_bytes(process: str = "self") -> dict[str, int]:
    """Resident set of a process now and at its highest, from /proc/PID/status."""
    found = {}
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM", "RssAnon", "RssShmem"):
            found[name] = int(value.split()[0]) * 1024
    return found


class DeviceWatch:
    """Samples the device every 20 ms: `peak_bytes` of memory above what was used when it was made, and `use_pct`, the
    shares of time in which kernels ran (NVML's utilisation)."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]  # NVML numbers the hidden ones too
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(int(first or 0))
        self._before = self._used()
        self.peak_bytes = 0
        self.use_pct: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def _run(self) -> None:
        while not self._over.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, self._used() - self._before)
            self.use_pct.append(int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu))

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = 0

    def stop(self) -> int:
        """The peak in bytes."""
        self._over.set()
        self._thread.join()
        return self.peak_bytes


def drive_bytes(path: str | None) -> dict[str, int] | None:
    """Bytes read and written so far by the block device that holds `path`, from the kernel's counters."""
    if not path:
        return None
    import os

    device = os.stat(path).st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not stat.exists():
        return None
    numbers = stat.read_text().split()
    return {"read": int(numbers[2]) * 512, "written": int(numbers[6]) * 512}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernels_of(work: Callable[[], object], most: int = 30) -> list[tuple[float, int, str]]:
    """(milliseconds in all, launches, name) of the kernels and copies that `work` queues, those of the most time."""
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]) as found:
        work()
        synchronize()
    rows = [(event.self_device_time_total / 1e3, event.count, event.key[:160]) for event in found.key_averages()]
    return sorted(rows, reverse=True)[:most]


def bare_s(
    config: Any, rows: int, length: int, times: int, device: str, adapt: Callable[[Any], Any] | None = None
) -> float:
    """Seconds of the arithmetic alone of a step of `times` micro-batches of `rows` rows: transformers' own layer,
    compiled, its weights on the device in 16 bits for all layers, forward and again with its backward; then the head's
    products and the loss. `adapt`: makes adapters of a model, which are trained then alone. Takes off the cap."""
    from transformers import AutoModelForCausalLM

    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.use_cache = 1, False
    with torch.device(device):
        whole: Any = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16, attn_implementation="sdpa")
        position = torch.arange(length)[None]
        hidden = torch.randn(rows, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(2, config.vocab_size, (rows * length,))
    base = whole if adapt is None else adapt(whole).get_base_model()
    layer, turn = torch.compile(base.model.layers[0]), base.model.rotary_emb(hidden, position)

    def one_layer() -> None:
        with torch.no_grad():
            layer(hidden, position_embeddings=turn, attention_mask=None)
        layer(hidden, position_embeddings=turn, attention_mask=None).backward(hidden)

    def head() -> None:
        for part, wanted in zip(hidden.flatten(0, 1).split(1024), labels.split(1024), strict=True):
            torch.nn.functional.cross_entropy(base.lm_head(part).float(), wanted).backward()

    def seconds_of(work: Callable[[], None], repeats: int) -> float:
        work()
        synchronize()
        begin_s = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize()
        return (time.perf_counter() - begin_s) / repeats

    one_layer()
    one_micro_batch_s = config.num_hidden_layers * seconds_of(one_layer, config.num_hidden_layers)
    return times * (one_micro_batch_s + seconds_of(head, 2))


def finish(result: dict[str, Any]) -> None:
    """The result as the last line of the output."""
    if torch.cuda.is_available():
        result.setdefault("torch_peak_bytes", torch.cuda.max_memory_allocated())
        result.setdefault("torch_reserved_bytes", torch.cuda.max_memory_reserved())
    result |= {"rss": rss_bytes(), "time": time.time()}
    print("RESULT " + json.dumps(result), flush=True)
