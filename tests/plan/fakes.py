"""Machines and shapes for the planner's tests."""

import dataclasses
from typing import Any

import torch

from outcore.common.quantities import GIB
from outcore.config import DeepSpeedFile, ProcessFacts, RunSettings, TrainConfig, resolve
from outcore.engine.deepspeed.build import deepspeed_layout
from outcore.engine.deepspeed.settings import ChosenOffload
from outcore.engine.stream.settings import StreamSettings
from outcore.machine import Drive, Gpu, LinkRates, Machine
from outcore.plan.hardware import Hardware
from outcore.plan.record import Plan
from outcore.plan.run.forecast import Layout, plan_layout, run_request
from outcore.sizing.shape import ModelShape, shape_from_fields

TB = 10**12


def prototype_shape() -> ModelShape:
    """The Llama of 1.21 B parameters that the measured constants come from."""
    fields = {
        "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 5632, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return shape_from_fields("prototype", "llama", fields)


def server(**changes: Any) -> Hardware:
    """The server that was measured: H200, PCIe 5.0, DRAM triad 180 GB/s, a disk of 3.4-4.8 GB/s mixed."""
    return dataclasses.replace(
        Hardware(
            name="server", vram_bytes=139 * GIB, ram_bytes=400 * GIB, pinned_bytes=400 * GIB, nvme_free_bytes=20 * TB,
            nvme_total_bytes=20 * TB, h2d_gb_per_s=55.5, d2h_gb_per_s=52.0, drive_read_gb_per_s=4.2,
            drive_write_gb_per_s=3.9, ram_gb_per_s=180.0, drive_mixed_gb_per_s=3.9, compute_tflops=540.0,
        ),
        **changes,
    )  # fmt: skip


def machine(**changes: Any) -> Machine:
    """A measured desktop with an RTX 4090."""
    return dataclasses.replace(
        Machine(
            os_family="linux",
            os_name="Ubuntu 24.04",
            kernel="6.8.0",
            architecture="x86_64",
            is_wsl2=False,
            python_version="3.12.3",
            cpu_name="Some CPU",
            cpu_cores=8,
            cpu_threads=16,
            ram_total_bytes=128 * GIB,
            ram_available_bytes=120 * GIB,
            gpus=(Gpu(0, "NVIDIA GeForce RTX 4090", 24 * GIB, pcie_gen_max=4, pcie_width_max=16),),
            drives=(
                Drive("/", "nvme", "test", "/", "ext4", total_bytes=2 * TB, free_bytes=TB, pcie_gen=4, pcie_width=4),
            ),
            links=LinkRates(
                "measured", 25.0, 24.0, 40.0, 6.0, 5.0, 5.5, 60.0,
                optimizer_gparams_per_s={"fp32": 1.5, "split": 1.6, "fp32_m8": 2.2, "split8": 2.4}, host_layer_s=0.0025,
            ),
        ),
        **changes,
    )  # fmt: skip


def settings_of(**said: Any) -> RunSettings:
    """A run of 2 micro-batches of 4 rows in bf16, recomputed; `said`: other flags."""
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "activation_checkpointing": True}
    return resolve(TrainConfig(**{**usual, **said}), DeepSpeedFile(), ProcessFacts("bf16"))


def layout_of(told: StreamSettings | ChosenOffload, settings: RunSettings, hardware: Hardware) -> Layout:
    """How a model is run by the streaming engine that was told this, or by DeepSpeed."""
    if isinstance(told, StreamSettings):
        rows, times = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
        return told.layout(rows, times, torch.device("cpu" if hardware.is_cpu else "cuda"))
    return deepspeed_layout(told, settings, hardware.num_gpus)


def plan_of(
    shape: ModelShape,
    hardware: Hardware,
    told: StreamSettings | ChosenOffload,
    settings: RunSettings | None = None,
    *,
    seq_length: int = 1024,
    kept: int = 2,
) -> Plan:
    """The plan of a run whose engine decided this: of the streaming engine, or of DeepSpeed."""
    settings = settings or settings_of(state_format=told.states)
    layout = layout_of(told, settings, hardware)
    return plan_layout(shape, run_request(settings, layout, seq_length, kept), hardware, layout)
