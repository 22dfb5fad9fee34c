"""ZeRO-3 on the CPU accelerator against plain PyTorch: same initial weights, losses, gradients, samples in between.

The comparison runs in child processes (this file as a script): DeepSpeed's accelerator is chosen once a process.
"""

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.forked import start_script

ROOT = Path(__file__).parents[2]
CASES = ("tied", "untied-checkpointed", "moe-checkpointed", "learned-positions", "lora", "trained", "encoder-decoder")


def run_children(world_size: int) -> dict[str, dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or str(Path(sys.prefix) / "torch_extensions")
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world_size):
            environment = {
                **os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions, "PYTHONPATH": str(ROOT),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size), "RANK": str(rank),
                "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            log = Path(folder) / f"log-{rank}.txt"
            children.append(start_script(Path(__file__), [folder], environment, log))
        try:
            codes = [child.wait(900) for child in children]
        finally:
            for child in children:
                child.kill()
        for rank, code in enumerate(codes):
            assert code == 0, (Path(folder) / f"log-{rank}.txt").read_text()[-6000:]
        return json.loads((Path(folder) / "result.json").read_text())


def check(results: dict[str, dict[str, float]]) -> None:
    assert tuple(results) == CASES
    for case, result in results.items():
        assert result["facts_equal"] and result["partitioned"], case
        assert result["initial_difference"] == 0.0, case
        assert result["loss_difference"] < 1e-5, (case, result)
        assert result["gradient_difference"] < 1e-4, (case, result)
        assert result["weight_difference"] < 1e-4, (case, result)
        assert result["samples_equal"], case


@pytest.mark.more
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_zero3_equals_plain_training(world_size):
    pytest.importorskip("deepspeed")
    check(run_children(world_size))


def child(folder: str) -> None:
    """One rank: every case against the same case without DeepSpeed, largest differences written by rank 0."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_grad

    from outcore.common.os_layer import remove_own_buffer
    from outcore.model import LoraSettings, ModelSettings, generate_tokens, load_model
    from outcore.model.weights.zero3 import settle

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.barrier()
    remove_own_buffer(rank)
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    gpt2 = {
        "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
    }  # fmt: skip

    def largest_difference(plain: torch.nn.Module, zero: torch.nn.Module) -> float:
        found = 0.0
        for ours, theirs in zip(plain.parameters(), zero.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([theirs]), torch.no_grad():
                found = max(found, float((ours - theirs).abs().max()))
        return found

    saved = str(Path(folder) / "saved")
    cases = {
        "tied": {"preset": "tiny", "config_overrides": small},
        "untied-checkpointed": {
            "preset": "tiny",
            "config_overrides": {**small, "tie_word_embeddings": False},
            "gradient_checkpointing": True,
        },
        "moe-checkpointed": {"preset": "tiny-moe", "gradient_checkpointing": True},
        "learned-positions": {"preset": "gpt2", "config_overrides": gpt2},
        "lora": {
            "preset": "tiny", "config_overrides": small, "lora": LoraSettings(r=4), "gradient_checkpointing": True,
        },
        "trained": {"model_name_or_path": saved},
        "encoder-decoder": {"preset": "tiny-t5", "config_overrides": {"dropout_rate": 0.0}},
    }  # fmt: skip
    configuration = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 20000,
            "stage3_max_live_parameters": 50000, "stage3_max_reuse_distance": 50000,
        },
    }  # fmt: skip
    results = {}
    started_s = time.process_time()
    for case, fields in cases.items():
        settings = ModelSettings(**{"precision": "fp32", "seq_length": 32, "vocab_size": 128, **fields})
        plain = load_model(settings)
        if case == "tied":
            if rank == 0:
                plain.model.save_pretrained(saved)
            torch.distributed.barrier()
        torch.manual_seed(1000 + rank)  # what ranks draw by themselves must not matter
        zero = load_model(settings, zero3_config=configuration)
        result = {
            "facts_equal": plain.facts == zero.facts,
            "partitioned": all(hasattr(p, "ds_id") for n, p in zero.model.named_parameters() if "lora_" not in n),
            "initial_difference": 0.0, "loss_difference": 0.0, "gradient_difference": 0.0, "weight_difference": 0.0,
        }  # fmt: skip
        result["initial_difference"] = largest_difference(plain.model, zero.model)
        module = zero.loss_module(num_chunks=3)
        trainable = [p for p in module.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=trainable,  # pyright: ignore[reportArgumentType]
            optimizer=torch.optim.SGD(trainable, lr=0.1),
            config=configuration,
        )
        loss = plain.token_loss(num_chunks=1)  # the head's gradient is autograd's own
        optimizer = torch.optim.SGD([p for p in plain.model.parameters() if p.requires_grad], lr=0.1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            ids = torch.randint(2, 128, (world, 2, 24), generator=generator)
            labels = ids.clone()
            for other in range(world):
                labels[other, 0, : 5 + 4 * other] = -100
            first = 0 if plain.facts.is_encoder_decoder else 1
            tokens = int((labels[:, :, first:] != -100).sum())
            total = 0.0
            for other in range(world):
                part = loss(plain.model, {"input_ids": ids[other], "labels": labels[other]}).objective(tokens)
                part.backward()
                total += float(part.detach())
            # DeepSpeed averages gradients over ranks, so each rank's part is taken times their number.
            objective, *_ = engine({"input_ids": ids[rank], "labels": labels[rank]}, tokens / world)
            engine.backward(objective)
            mean = objective.detach().clone()
            torch.distributed.all_reduce(mean)
            result["loss_difference"] = max(result["loss_difference"], abs(total - float(mean) / world) / total)
            pairs = list(zip(plain.model.parameters(), zero.model.parameters(), strict=True))
            pairs = [(p, q) for p, q in pairs if p.requires_grad]
            scale = max(float(p.grad.abs().max()) for p, _ in pairs if p.grad is not None)
            for p, q in pairs:
                theirs = safe_get_full_grad(q)
                difference = float((theirs - p.grad).abs().max()) / scale
                result["gradient_difference"] = max(result["gradient_difference"], difference)
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
            with torch.no_grad():
                batch = {"input_ids": ids[rank], "labels": labels[rank]}
                root: torch.nn.Module = engine.module  # pyright: ignore[reportAssignmentType]
                same = torch.allclose(root(batch)[1], loss(plain.model, batch).loss_sum, rtol=1e-4)
            wanted = generate_tokens(plain.model, ids[0, :1, :6], 2)
            same = same and generate_tokens(engine, ids[0, :1, :6], 2).tolist() == wanted.tolist()
            settle(engine)
            result["samples_equal"] = bool(same and result.get("samples_equal", True))
        result["weight_difference"] = largest_difference(plain.model, zero.model)
        results[case] = result
        print(f"{case}: {time.process_time() - started_s:.1f} s of CPU time so far", flush=True)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(results))


if __name__ == "__main__":
    child(sys.argv[1])
