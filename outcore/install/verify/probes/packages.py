"""Trials of the installed packages: each is used once for real, because an import alone proves little."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from outcore.install.verify.probes.recorder import ProbeRecorder, Unneeded


def check_packages(recorder: ProbeRecorder, accelerator: str) -> None:
    """Use every package once."""
    recorder.try_part("torch", lambda: _try_torch(accelerator))
    recorder.try_part("NVML", lambda: _try_nvml(accelerator))
    recorder.try_part("cupy", lambda: _try_cupy(accelerator))
    recorder.try_part("kvikio", lambda: _try_kvikio(accelerator))
    recorder.try_part("tokenizers", _try_tokenizers)
    recorder.try_part("transformers", _try_transformers)
    recorder.try_part("peft", _try_peft)
    recorder.try_part("datasets", _try_datasets)
    recorder.try_part("safetensors", _try_safetensors)
    recorder.try_part("psutil", _try_psutil)
    recorder.try_part("TensorBoard", _try_tensorboard)
    recorder.try_part("matplotlib", _try_matplotlib)
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


def _try_tokenizers() -> str:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    text = "def train(model): return model"
    tokenizer.train_from_iterator([text] * 4, trainer)
    if tokenizer.decode(tokenizer.encode(text).ids) != text:
        raise RuntimeError("a text did not survive encoding and decoding")
    return f"{tokenizers.__version__}, trained a small BPE"


def _tiny_llama():
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
    return transformers.LlamaForCausalLM(config)


def _try_transformers() -> str:
    import torch
    import transformers

    ids = torch.arange(8).reshape(1, 8)
    loss = _tiny_llama()(input_ids=ids, labels=ids).loss
    loss.backward()
    return f"{transformers.__version__}, forward and backward of a small Llama, loss {loss.item():.2f}"


def _try_peft() -> str:
    import peft

    model = peft.get_peft_model(_tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if trainable != 2 * 16 * 2:
        raise RuntimeError(f"LoRA of rank 2 on a 16x16 matrix trains {trainable} numbers, 64 expected")
    return f"{peft.__version__}, LoRA on a small Llama"


def _try_datasets() -> str:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "bb"]})
    lengths = rows.map(lambda row: {"n": len(row["text"])}, load_from_cache_file=False)["n"]
    if list(lengths) != [1, 2]:
        raise RuntimeError(f"mapping two rows gave {list(lengths)}")
    return f"{datasets.__version__}, mapped a table"


def _try_safetensors() -> str:
    import safetensors
    import safetensors.torch
    import torch

    sent = {"weight": torch.arange(4, dtype=torch.bfloat16)}
    if not torch.equal(safetensors.torch.load(safetensors.torch.save(sent))["weight"], sent["weight"]):
        raise RuntimeError("a tensor did not survive saving and loading")
    return f"{safetensors.__version__}, saved and loaded"


def _try_psutil() -> str:
    import psutil

    return f"{psutil.__version__}, this process holds {psutil.Process().memory_info().rss >> 20} MiB"


def _try_tensorboard() -> str:
    import tensorboard
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        writer.add_scalar("loss", 1.0, 0)
        writer.close()
        if not any(path.stat().st_size for path in Path(folder).glob("events.*")):
            raise RuntimeError("no event file was written")
    return f"{tensorboard.__version__}, wrote an event file"


def _try_matplotlib() -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    with tempfile.TemporaryFile() as out:
        figure = Figure()
        figure.add_subplot().plot([1, 2, 3])
        figure.savefig(out, format="png")
        if out.tell() < 1000:
            raise RuntimeError("the picture is empty")
    return f"{matplotlib.__version__}, drew a picture"


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
