"""How each case is prepared: the damaged file, the full drive, the wrong tokenizer."""

import contextlib
import importlib
import json
import os
import shutil
from collections.abc import Callable
from typing import Any

from tests.bad_inputs.world import REPOSITORY, NotHere, World

Setup = Callable[[World], None]


def file(name: str, content: str | bytes | dict[str, Any] = "") -> Setup:
    """The case needs this file."""
    return lambda world: (world.file(name, content), None)[1]


def rows(name: str, *rows: Any) -> Setup:
    """A jsonl file; a text is a line as it stands, anything else is written as JSON."""
    return file(name, "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def ds_config(**changes: Any) -> Setup:
    """{here}/ds.json: the repository's deepspeed_config.json with changes."""
    shipped = json.loads((REPOSITORY / "deepspeed_config.json").read_text())
    return file("ds.json", {**shipped, **changes})


def offline(world: World) -> None:
    """No network: the hub's own switch."""
    for module in ("huggingface_hub.constants", "datasets.config"):
        world.patch(importlib.import_module(module), "HF_HUB_OFFLINE", True)


def damaged_weights(world: World) -> None:
    path = world.copy_model() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickled_weights(world: World) -> None:
    folder = world.copy_model()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_layer(world: World) -> None:
    path = world.copy_model() / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] += 1
    path.write_text(json.dumps(config))


def small_vocabulary(world: World) -> None:
    """A tokenizer with more tokens than the model: the model's own plus two hundred."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world.shared.model)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(200)])
    tokenizer.save_pretrained(world.here / "tokenizer")


def truncated_shard(world: World) -> None:
    path = next(world.copy_run().glob("master-*.safetensors"))
    os.truncate(path, path.stat().st_size - 4096)


def flipped_bit(world: World) -> None:
    path = next(world.copy_run().glob("exp_avg_sq-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def newest_damaged(world: World) -> None:
    truncated_shard(world)


def all_damaged(world: World) -> None:
    truncated_shard(world)
    (world.here / "checkpoint/done/step-00000001/trainer.json").unlink()


def missing_manifest(world: World) -> None:
    (world.copy_run() / "manifest.json").unlink()


def damaged_manifest(world: World) -> None:
    (world.copy_run() / "manifest.json").write_text('{"format_version": 1, "step": 2, "fi')


def weights_only(world: World) -> None:
    """A checkpoint as a run with its optimizer on NVMe leaves it."""
    from dataclasses import replace

    from outcore.checkpoint.manifest import Manifest

    folder = world.copy_run()
    trainer = json.loads((folder / "trainer.json").read_text())
    trainer["engine"]["optimizer_state"] = False
    (folder / "trainer.json").write_text(json.dumps(trainer))
    before = Manifest.load(folder)
    found = Manifest.of(folder, before.step, before.order, {}, before.config_sha256)
    replace(before, files=found.files).save(folder)


def copied_run(world: World) -> None:
    world.copy_run()


def small_drive(name: str, size_mb: int) -> Setup:
    return lambda world: (world.small_drive(name, size_mb), None)[1]


def read_only(name: str) -> Setup:
    return lambda world: (world.read_only(name), None)[1]


def filling_drive(world: World) -> None:
    """After the second step another program leaves 20 MB on the drive that the checkpoints are on."""
    from outcore.train.loop import TrainingLoop

    drive = world.sparse_drive("small", 4)
    original = TrainingLoop.train_one

    def step_then_fill(self: TrainingLoop, batches: Any) -> Any:
        result = original(self, batches)
        if self.step == 2:
            with open(drive / "other", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(drive).free - 20_000_000)
        return result

    world.patch(TrainingLoop, "train_one", step_then_fill)


def full_drive(world: World) -> None:
    drive = world.small_drive("small", 1)
    with open(drive / "other", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def ram_disk(world: World) -> None:
    no_gpu(world)  # there DeepSpeed's drive extension would first be compiled, for minutes
    world.small_drive("ram", 2000)


def nvme_in_use(world: World) -> None:
    """Another run has its scratch files in {here}/nvme."""
    from outcore.flow.weights import Scratch

    other = Scratch([world.here / "nvme"])
    world.undo.callback(other.close)


def no_gpu(world: World) -> None:
    import torch

    if torch.cuda.is_available():
        raise NotHere("this machine has a GPU")
