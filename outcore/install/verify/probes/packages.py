"""Trials of the installed packages: those that depend on this machine are used once for real, others are imported."""

from __future__ import annotations

import importlib
import os
import tempfile

from outcore.install.verify.probes.recorder import ProbeRecorder, Unneeded

IMPORTED = {
    "tokenizers": ("tokenizers",),
    "peft": ("peft",),
    "datasets": ("datasets",),
    "safetensors": ("safetensors", "safetensors.torch"),
    "psutil": ("psutil",),
    "TensorBoard": ("tensorboard", "torch.utils.tensorboard"),
    "matplotlib": ("matplotlib", "matplotlib.figure"),
}
"""Part -> its package and what of it is used: an import loads the compiled pieces, which a machine can spoil."""


def check_packages(recorder: ProbeRecorder, accelerator: str) -> None:
    """Use or import every package once."""
    recorder.try_part("torch", lambda: _try_torch(accelerator))
    recorder.try_part("NVML", lambda: _try_nvml(accelerator))
    recorder.try_part("cupy", lambda: _try_cupy(accelerator))
    recorder.try_part("kvikio", lambda: _try_kvikio(accelerator))
    recorder.try_part("transformers", _try_transformers)
    for part, modules in IMPORTED.items():
        recorder.try_part(part, lambda modules=modules: _imported(*modules))
    recorder.try_part("CPU optimizer", _try_optimizer)


def _try_torch(accelerator: str) -> str:
    import torch

    if accelerator == "cpu":
        left = torch.arange(6.0).reshape(2, 3)
        product = left @ left.T
        if product.tolist() != [[5.0, 14.0], [14.0, 50.0]]:
            raise RuntimeError(f"a 2x3 matrix product came out wrong: {product.tolist()}")
        return f"{torch.__version__}, matrix product right"
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU")
    sent = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
    back = (sent.to("cuda", non_blocking=True) * 2).cpu()
    if not torch.equal(back, sent * 2):
        raise RuntimeError("a tensor came back from the GPU changed")
    return f"{torch.__version__}, CUDA {torch.version.cuda}, 4 MiB to {torch.cuda.get_device_name(0)} and back"


def _try_nvml(accelerator: str) -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if accelerator == "cpu":
            raise Unneeded(f"no GPU to ask ({error})") from error
        raise
    driver, count = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount()
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    used_mib, total_mib = int(memory.used) >> 20, int(memory.total) >> 20
    pynvml.nvmlShutdown()
    return f"driver {driver}, {count} GPU(s), {used_mib} of {total_mib} MiB in use on GPU 0"


def _try_cupy(accelerator: str) -> str:
    if accelerator == "cpu":
        raise Unneeded("not installed: it needs a CUDA GPU")
    import cupy

    total = int(cupy.arange(1000).sum())
    if total != 499500:
        raise RuntimeError(f"the sum of 0..999 came out as {total}")
    return f"{cupy.__version__}, CUDA runtime {cupy.cuda.runtime.runtimeGetVersion()}, sum on the GPU right"


def _try_kvikio(accelerator: str) -> str:
    if accelerator == "cpu":
        raise Unneeded("not installed: its reads and writes need libcuda, hence a GPU")
    import cupy
    import kvikio

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "round-trip")
        sent = cupy.arange(1 << 16, dtype=cupy.uint8)
        with kvikio.CuFile(path, "w") as out:
            out.write(sent)
        back = cupy.zeros_like(sent)
        with kvikio.CuFile(path, "r") as source:
            n_bytes = source.read(back)
        if n_bytes != sent.nbytes or not bool((back == sent).all()):
            raise RuntimeError("a file written from GPU memory reads back differently")
    return f"{kvikio.__version__}, GPU memory to a file and back (which path: outcore probe tells)"


def _imported(*modules: str) -> str:
    package, *_ = [importlib.import_module(name) for name in modules]
    return f"{package.__version__}, imports"


def _try_transformers() -> str:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    ids = torch.arange(8).reshape(1, 8)
    loss = transformers.LlamaForCausalLM(config)(input_ids=ids, labels=ids).loss
    loss.backward()
    return f"{transformers.__version__}, forward and backward of a small Llama, loss {loss.item():.2f}"


def _try_optimizer() -> str:
    """Build the C++ optimizer where training will look for it (18 s of one core, once), and let it make a step."""
    import torch

    from outcore.optim import SPLIT, AdamWHyper, ChunkJob, ChunkState, open_backend

    backend = open_backend("extension")
    numel, made = 1000, []
    for one in (backend, open_backend("torch")):
        param = torch.linspace(-1, 1, numel).to(torch.bfloat16)
        buffer = torch.zeros(SPLIT.chunk_bytes(numel), dtype=torch.uint8)
        ChunkState(SPLIT, buffer, numel, param).initialise()
        one.update(SPLIT, ChunkJob(param.clone().mul_(3), buffer, param, 0), AdamWHyper(lr=0.1, step=1))
        made.append((param, buffer))
    if not all(torch.equal(a, b) for a, b in zip(*made, strict=True)):
        raise RuntimeError("a step of the built extension differs from torch's")
    return f"{backend.name}, a step equal to torch's bit by bit"
