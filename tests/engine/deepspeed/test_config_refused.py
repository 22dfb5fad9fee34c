"""The builder refuses what is wrong, named by its key."""

import re
from typing import Any

import pytest

from outcore.engine.deepspeed.config.builder import RunFacts
from outcore.sizing.swapping import WeightCounts
from tests.engine.deepspeed.config_cases import INFINITY, build, settings_of
from tests.refused import refused


@pytest.mark.parametrize("user, settings, run, said", [
    ({"gradient_cliping": 1}, {}, {}, "Did you mean 'gradient_clipping'"),
    ({"zero_optimization": {"sub_group": 1}}, {}, {}, "Did you mean 'sub_group_size'"),
    ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, {}, {}, "offload_param.devise"),
    ({"outcore": {"staging_byte": 1}}, {}, {}, "Did you mean 'staging_bytes'"),
    ({"outcore": {"staging_bytes": "8GB"}}, {}, {}, "outcore.staging_bytes"),
    ({"outcore": {"engine": "fast"}}, {}, {}, "outcore.engine"),
    ({"outcore": {"nvme_path": 3}}, {}, {}, "outcore.nvme_path"),
    ({"amp": {"enabled": True}}, {}, {}, "'amp' was removed"),
    ({"zero_optimization": {"mics_shard_size": 2}}, {}, {}, "mics_shard_size was removed"),
    ({"autotuning": {"enabled": True}}, {}, {}, "'autotuning' is not supported"),
    ({"zero_optimization": [3]}, {}, {}, "'zero_optimization' must be a JSON object"),
    ({"zero_optimization": {"stage": 4}}, {}, {}, "stage must be 0, 1, 2 or 3"),
    ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, {}, {}, "offload_optimizer.device"),
    ({"zero_optimization": {"reduce_bucket_size": -1}}, {}, {}, "reduce_bucket_size"),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, {}, {}, "reduce_bucket_size must be above 0"),
    ({"zero_optimization": {"zenflow": {"x": 1}}}, {}, {}, "zenflow"),
    ({"zero_optimization": {"legacy_stage1": True}}, {}, {}, "legacy_stage1"),
    ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, {}, {}, "super_offload"),
    ({"zero_optimization": {"zero_hpz_partition_size": 2}}, {}, {}, "zero_hpz_partition_size"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, {}, {"device": "cpu"}, "zero_quantized_weights"),
    ({"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": 1}}}, {}, {}, "pin_memory"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, {}, "contradict each other"),
    ({"bf16": {}, "bfloat16": {}}, {}, {}, "same block"), ({"bf16": {"enabled": "yes"}}, {}, {}, "bf16.enabled"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {"zero_stage": 2}, {}, "master_weights"),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, {"zero_stage": 0}, {}, "grad_accum_dtype"),
    ({"data_types": {"grad_accum_dtype": "fp8"}}, {}, {}, "grad_accum_dtype"),
    ({"data_types": {"param_dtype": "fp32"}}, {}, {}, "param_dtype"),
    ({"torch_autocast": {"enabled": True}}, {}, {}, "torch_autocast.enabled"),
    ({"torch_autocast": True}, {}, {}, "'torch_autocast' must be"),
    ({"prescale_gradients": True}, {}, {}, "prescale_gradients"),
    ({"gradient_allreduce_op": "sum"}, {}, {}, "gradient_allreduce_op"),
    ({"managed_gradient_accumulation": False}, {}, {}, "managed_gradient_accumulation"),
    ({"sequence_parallel_size": 2}, {}, {}, "sequence_parallel_size"),
    ({"communication_data_type": "fp8"}, {}, {}, "communication_data_type"),
    ({"train_batch_size": 9}, {}, {}, "train_batch_size 9"),
    (
        {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, {}, {},
        "Remove one of the three",
    ),
    ({"train_batch_size": 8.5}, {}, {}, "train_batch_size must be a whole number"),
    ({"optimizer": {"type": "Lion"}}, {}, {}, "optimizer.type 'Lion'"),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, {}, {}, "write gradient_clipping"),
    ({"optimizer": {"type": "AdamW", "params": {"beta": 1}}}, {}, {}, "Did you mean 'betas'"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, {}, {}, "betas must be two numbers"),
    ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, {}, {}, "adam_w_mode"),
    ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, {}, {}, "amsgrad"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, {}, {}, "learning_rate"),
    ({}, {}, {"adam_beta2": 1.0}, "adam_beta2"), ({"gradient_clipping": -1}, {}, {}, "gradient_clipping"),
    ({"scheduler": {"type": "OneCycle"}}, {}, {}, "scheduler.type 'OneCycle' is not one of"),
    ({"aio": {"block_size": 1000}}, {}, {}, "aio.block_size"),
    ({"aio": {"intra_op_parallelism": 3}}, {}, {}, "intra_op_parallelism"),
    ({"aio": {"queue_depth": 0}}, {}, {}, "aio.queue_depth"),
    ({"aio": {"single_submit": 1}}, {}, {}, "aio.single_submit"), ({"aio": {"use_gds": True}}, {}, {}, "aio.use_gds"),
    ({}, {"zero_stage": 2, "offload_params": "cpu"}, {}, "offload_params cpu needs"),
    ({}, {"zero_stage": 0, "offload_optimizer": "cpu"}, {}, "offload_optimizer cpu needs"),
    ({}, {"zero_stage": 1, "offload_optimizer": "nvme"}, {}, "offload_optimizer nvme needs"),
    ({}, {**INFINITY, "offload_params": "cpu"}, {}, "nvme_offload_params and offload_params cpu contradict"),
    ({}, {**INFINITY, "nvme_offload_params": False, "offload_params": "nvme"}, {}, "contradict each other"),
    (
        {"outcore": {"residency": "ram"}, "zero_optimization": {"offload_param": {"device": "nvme"}}}, {}, {},
        "residency ram contradicts",
    ),
])  # fmt: skip
def test_refusals_name_the_key(user: dict, settings: dict, run: dict, said: str) -> None:
    refused(ValueError, re.escape(said), lambda: build(user, settings, run))


def test_gradients_on_a_drive_are_not_deepspeeds() -> None:
    asked = {**INFINITY, "nvme_offload_gradients": True}
    refused(ValueError, "stock DeepSpeed has no such setting", lambda: build({}, asked, staged=False))


@pytest.mark.parametrize("make, said", [
    (lambda: settings_of(flags={"aio_block_size": 1000}), "aio_block_size"),
    (lambda: settings_of(flags={"aio_queue_depth": 0}), "aio_queue_depth"),
    (lambda: settings_of(flags={"aio_queue_depth": 10**6}), "aio_queue_depth"),
    (lambda: settings_of(flags={"max_in_cpu_gb": -1}), "max_in_cpu_gb"),
    (lambda: settings_of(flags={"offload_params": "disk"}), "offload_params"),
    (lambda: WeightCounts(0, 1), "total_params"),
    (lambda: WeightCounts(10, 11), "largest_weight_numel"),
    (lambda: WeightCounts(10, 5, trainable_params=0), "trainable_params"),
    (lambda: RunFacts(world_size=0), "world_size"),
    (lambda: RunFacts(world_size=2, local_world_size=4), "local_world_size"),
    (lambda: RunFacts(device="tpu"), "device"),  # type: ignore[arg-type]
    (lambda: RunFacts(run_name="a/b"), "run_name"),
])  # fmt: skip
def test_facts_are_checked(make: Any, said: str) -> None:
    refused(ValueError, said, make)


def test_unknown_types_of_file() -> None:
    refused(ValueError, "JSON object", lambda: settings_of([]))
    assert "_note" not in build({"_note": "mine", "comment": "x"}).config
