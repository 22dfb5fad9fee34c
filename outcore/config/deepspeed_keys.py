"""The keys DeepSpeed 0.19.8 reads, so that a misspelled one is an error with a hint instead of being ignored.

DeepSpeed itself ignores unknown top-level keys (`gradient_cliping` would silently train without clipping) and fails
deep inside on unknown nested ones. A test compares these tables with the installed DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.common.words import did_you_mean


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL = _words(
    """activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comms_logger communication_data_type compile
    csv_monitor comet data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather
    disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown
    optimizer pipeline prescale_gradients scheduler seq_parallel_communication_data_type sequence_parallel_size
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"""
)
"""Top-level keys, from deepspeed/runtime/config.py and the modules it calls."""

REMOVED = {
    "nebula": "Nebula checkpointing",
    "compression_training": "the compression library",
    "amp": "NVIDIA Apex; use bf16 or fp16",
    "quantize_training": "mixture-of-quantization",
    "sparse_gradients": "sparse embedding gradients",
    "eigenvalue": "eigenvalue-based quantization",
    "sparse_attention": "sparse attention",
    "elasticity": "elastic training",
    "graph_harvesting": "graph harvesting",
    "curriculum_learning": "the top-level form; use data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "progressive layer dropping",
}
"""Keys that DeepSpeed 0.19 refuses because the feature was removed."""
REMOVED_ZERO = {
    "mics_shard_size": "MiCS sharding",
    "mics_hierarchical_params_gather": "MiCS sharding",
    "zeropp_loco_param": "LoCo-ZeRO++",
}

UNSUPPORTED = {
    "hybrid_engine": "it is for reinforcement learning with generation",
    "pipeline": "outcore's DeepSpeed engine is data parallel, and DeepSpeed's pipeline takes ZeRO-1 at most",
    "tensor_parallel": "outcore's engines are data parallel; such files are for scripts that call DeepSpeed themselves",
    "expert_parallel": "outcore's DeepSpeed engine is data parallel",
    "autotuning": "outcore measures the machine itself",
    "weight_quantization": "it is for inference",
    "datastates_ckpt": "outcore writes its own checkpoints",
    "data_efficiency": "outcore feeds its own batches",
}
"""Features of DeepSpeed that outcore's training loop does not drive; harmless when absent or disabled."""

ZERO = _words(
    """allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients
    cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear
    model_persistence_threshold module_granularity_threshold offload_optimizer offload_param overlap_comm
    override_module_apply param_persistence_threshold parameter_alignment pipeline_loading_checkpoint
    prefetch_bucket_size reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params
    sub_group_size use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow
    zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights
    zero_quantized_weights"""
)
OFFLOAD_PARAM = _words("buffer_count buffer_size device max_in_cpu nvme_path pin_memory")
OFFLOAD_OPTIMIZER = _words(
    """buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio
    super_offload"""
)
BF16 = _words("bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update")
FP16 = _words(
    """auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power
    loss_scale loss_scale_window min_loss_scale"""
)
AIO = _words("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds")
AIO_IGNORED = frozenset({"thread_count"})
"""Older name of intra_op_parallelism; DeepSpeed 0.19.8 ignores it."""
ADAM = _words(
    """lr betas eps weight_decay torch_adam adam_w_mode bias_correction amsgrad fp32_optimizer_states fused
    foreach"""
)
SCHEDULERS = ("WarmupDecayLR", "WarmupCosineLR", "WarmupLR")
DATA_TYPES = _words("grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules")
OUTCORE = _words(
    "staging_bytes write_combined engine nvme_path residency state_format ram_budget_gib storage lanes "
    "transfer_path offload nvme_offload_gradients"
)
OUTCORE_IGNORED = frozenset({"streams"})
"""Keys of earlier files: a lane has one stream, two moved no more."""


def is_comment(key: str) -> bool:
    """Whether a key is a person's note."""
    return key.startswith(("_", "//", "#")) or key == "comment"


def check_block(name: str, block: object, known: frozenset[str], ignored: frozenset[str] = frozenset()) -> dict:
    """A copy of the block `name`; ValueError when it is no JSON object or holds a key DeepSpeed does not know."""
    if block is None:
        return {}
    if not isinstance(block, Mapping):
        raise ValueError(f"deepspeed_config.json: {name!r} must be a JSON object {{...}}, got {block!r}.")
    for key in block:
        if key not in known and key not in ignored:
            raise ValueError(
                f"deepspeed_config.json: DeepSpeed has no key {name}.{key}.{did_you_mean(key, known, 1)} "
                f"Known: {', '.join(sorted(known))}."
            )
    return {key: value for key, value in block.items() if key not in ignored}


def check_top_level(config: Mapping[str, Any]) -> None:
    """ValueError for a key that DeepSpeed would ignore, has removed, or that outcore cannot drive."""
    for key, value in config.items():
        if key == "outcore" or is_comment(key):
            continue
        if key in REMOVED:
            raise ValueError(
                f"deepspeed_config.json: {key!r} was removed from DeepSpeed ({REMOVED[key]}). Delete the key."
            )
        if key in UNSUPPORTED and _is_on(value):
            raise ValueError(
                f"deepspeed_config.json: {key!r} is not supported here: {UNSUPPORTED[key]}. Delete the block."
            )
        if key not in TOP_LEVEL:
            raise ValueError(
                f"deepspeed_config.json: DeepSpeed has no key {key!r} and would silently ignore it."
                f"{did_you_mean(key, TOP_LEVEL | {'outcore'}, 1)} Correct or delete it (a comment may start with '_')."
            )


def _is_on(block: object) -> bool:
    if isinstance(block, Mapping):
        return block.get("enabled", True) not in (False, "auto") and len(block) > 0
    return bool(block)
