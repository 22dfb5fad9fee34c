"""From settings to a running DeepSpeed engine: resolve the configuration, load partitioned, initialize.

What DeepSpeed's engine chose for a run, printable, and how it is opened."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outcore.common.os_layer import remove_own_buffer
from outcore.config import RunSettings
from outcore.engine.base import Engine, EngineError, Host
from outcore.engine.deepspeed.config.builder import build_config, check_by_deepspeed
from outcore.engine.deepspeed.engine import DeepSpeedEngine
from outcore.engine.deepspeed.environment import (
    ask_processor_once,
    prepare_environment,
    remove_stale_builds,
    tell_of_builds,
)
from outcore.engine.deepspeed.settings import BuiltConfig, ChosenOffload, RunFacts
from outcore.engine.deepspeed.staged.binding import check_version
from outcore.engine.deepspeed.staged.plan import make_plan
from outcore.flow import let_segments_grow
from outcore.flow.weights import choose_verification
from outcore.model import LoadedModel, ModelSettings, load_model, resolve_source
from outcore.model.adapters import with_adapters
from outcore.model.facts import checkpoint_name, model_class_of, model_facts, skeleton_and_tied, undecayed
from outcore.model.forward import attention_of, unwrap
from outcore.model.packed import PACKED_ATTENTION
from outcore.sizing.layouts import DeepSpeedLayout, Staged
from outcore.sizing.swapping import WeightCounts
from outcore.staging import whole_device


@dataclass(frozen=True)
class Resolved:
    """A DeepSpeed configuration with everything decided, and the facts it was decided from."""

    settings: RunSettings
    built: BuiltConfig
    model: WeightCounts
    run: RunFacts


def facts_for_builder(model: Any, tied_numels: tuple[int, ...] = ()) -> WeightCounts:
    """Sizes the builder needs, from a live model or a meta-device skeleton. `tied_numels`: see `WeightCounts`."""
    facts = model_facts(model)
    return WeightCounts(
        total_params=facts.total_params,
        largest_weight_numel=facts.largest_weight_numel,
        num_tensors=facts.num_tensors,
        hidden_size=facts.hidden_size,
        trainable_params=facts.trainable_params or None,
        tied_numels=tied_numels,
    )


def facts_before_loading(settings: ModelSettings, tokenizer: Any) -> WeightCounts:
    """Facts of a model that transformers will make or read, adapters included, without memory."""
    config = resolve_source(settings, tokenizer).config
    skeleton, tied_numels = skeleton_and_tied(model_class_of(config), config)
    if settings.lora is not None:
        with torch.device("meta"):
            skeleton = with_adapters(skeleton, settings.lora)
    return facts_for_builder(skeleton, tied_numels)


def resolve(
    settings: RunSettings,
    model_settings: ModelSettings,
    run: RunFacts,
    tokenizer: Any,
    loaded: LoadedModel | None = None,
) -> tuple[Resolved, LoadedModel | None]:
    """Decide the whole configuration before memory is spent; a model_module's own model is built on the way, unless
    it is given as `loaded`."""
    if loaded is None and model_settings.model_module is not None:
        loaded = load_model(model_settings, tokenizer=tokenizer)
    facts = facts_before_loading(model_settings, tokenizer) if loaded is None else facts_for_builder(loaded.model)
    staged = settings.offload.engine == "staged"
    if staged:
        check_version()
    built = build_config(settings, facts, run, staged=staged)
    if built.offload.stage == 3 and model_settings.lora is not None and model_settings.lora.use_dora:
        raise ValueError(
            "use_dora: DeepSpeed's ZeRO-3 takes a layer's weights away when it has run, and DoRA needs their lengths "
            "after that. Use --engine stream, or --zero_stage zero2."
        )
    check_by_deepspeed(built.config)
    return Resolved(settings, built, facts, run), loaded


def init_process_group(has_cuda: bool, local_rank: int) -> None:
    """Join this run's ranks (a group of one without a launcher). Must come before anything of DeepSpeed's.

    The group lives as long as the process: DeepSpeed keeps references to it that a new group would not replace."""
    prepare_environment(has_cuda, local_rank)
    remove_stale_builds(os.environ)
    ask_processor_once()
    # DeepSpeed's INFO lines and torch's notes on collectives that DeepSpeed still calls by their old names.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed

    tell_of_builds(os.environ)
    deepspeed.logger.setLevel(logging.ERROR)
    if has_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if has_cuda and int(os.environ["LOCAL_SIZE"]) > torch.cuda.device_count():
        # Ranks that share a GPU (a rehearsal of several): NCCL refuses them.
        torch.distributed.init_process_group("gloo")
        atexit.register(_leave_process_group)
    if not torch.distributed.is_initialized():
        with contextlib.redirect_stdout(io.StringIO()):  # "... built successfully", also where nothing was built
            deepspeed.init_distributed(verbose=False)
        if not has_cuda:
            torch.distributed.barrier()  # every rank has opened the others' buffers
            remove_own_buffer(torch.distributed.get_rank())
        atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def build_engine(
    resolved: Resolved,
    model_settings: ModelSettings,
    tokenizer: Any,
    loaded: LoadedModel | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> DeepSpeedEngine:
    """Load the model (partitioned under ZeRO-3) and make the engine. The process group must be there already."""
    config = resolved.built.config
    offload = resolved.built.offload
    if resolved.run.device != "cpu":
        let_segments_grow(whole_device("cuda"))
    with ExitStack() as opened:
        if offload.staged:
            opened.enter_context(staged_offload(resolved, say))
        if loaded is None:
            device = whole_device(resolved.run.device)
            zero3_config = config if offload.stage == 3 else None
            loaded = load_model(model_settings, tokenizer=tokenizer, zero3_config=zero3_config, device=device)
        for note in loaded.notes:
            say(f"model: {note}")
        if packed_rows := _packed_rows(loaded, model_settings, resolved.run):
            say(f"packed rows: {packed_rows}")
        engine = _initialize(loaded, config, resolved.settings, offload.staged)
        if offload.staged:
            say(f"offload: {engine.optimizer.words()}")
    return DeepSpeedEngine(
        engine,
        loaded,
        check_finite=resolved.settings.precision != "fp16",
        takes_borders=attention_of(unwrap(loaded.model)) == PACKED_ATTENTION,
    )


def _packed_rows(loaded: LoadedModel, settings: ModelSettings, run: RunFacts) -> str:
    """Have the model attend to packed rows by documents' borders where it can; in words, what it does. A user's loss of
    the whole model keeps masks: it may run the model on other rows than the batch's, and on parts of them."""
    from outcore.flow.check import attention_to_packed_rows

    if loaded.loss_fn is not None:
        return ""
    device = whole_device(run.device)
    return attention_to_packed_rows(loaded, device, settings.dtype, wanted=settings.attn_implementation == "auto")


def _initialize(loaded: LoadedModel, config: dict[str, Any], settings: RunSettings, staged: bool) -> Any:
    import deepspeed

    module = loaded.loss_module()
    trainable = _decay_groups(module, settings)
    if not trainable:
        raise EngineError("the model has no trainable parameter: check requires_grad in your model_module.")
    optimizer = None
    if staged:  # holds the parameter groups; its own step is never called
        optimizer = torch.optim.AdamW(
            trainable,
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
        )
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=trainable,  # pyright: ignore[reportArgumentType]  # annotated as a Module there
        optimizer=optimizer,
        config=config,
    )
    return engine


def _decay_groups(module: torch.nn.Module, settings: RunSettings) -> list[dict[str, Any]]:
    """The trainable parameters, those with weight decay and those without; [] where there are none."""
    exempt = frozenset[str]() if settings.decay_all else undecayed(module)
    named = [(checkpoint_name(name), p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if (name in exempt) is not decays], "weight_decay": decay}
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]


@contextmanager
def staged_offload(resolved: Resolved, say: Callable[[str], None]) -> Iterator[None]:
    """Within this context DeepSpeed's ZeRO-3 runs with outcore's optimizer step and swapper. The session stays with
    the optimizer, which closes it."""
    from outcore.engine.deepspeed.staged.binding import staged
    from outcore.engine.deepspeed.staged.session import StagedSession

    plan = make_plan(resolved.settings, resolved.built.offload, resolved.model, resolved.run)
    for note in plan.notes:
        say(f"offload: {note}")
    device = whole_device(resolved.run.device)
    session = StagedSession(plan, device, torch.distributed.get_rank())
    try:
        with staged(session):
            yield
    except BaseException:
        session.close()
        raise


STAGE_NAMES = ("none", "zero1", "zero2", "zero3")


def deepspeed_layout(offload: ChosenOffload, settings: RunSettings, num_gpus: int) -> DeepSpeedLayout:
    """Make the layout of these homes and settings: all that bytes and seconds depend on."""
    staged = None
    if offload.staged:
        per_rank = offload.ram_budget_bytes
        staged = Staged(
            offload.states,
            None if per_rank is None else per_rank * num_gpus,
            settings.staging_bytes,
            settings.offload.max_in_cpu_numel * settings.element_bytes if offload.params == "nvme" else 0,
            offload.gradients_on_nvme,
        )
    return DeepSpeedLayout(
        "infinity" if offload.uses_nvme else STAGE_NAMES[offload.stage],
        offload.optimizer,
        offload.params,
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
        staged=staged,
        packed_attention=settings.packed_attention,
    )


@dataclass(frozen=True)
class DeepSpeedDecision:
    """DeepSpeed's configuration, and what it was decided from; see `Decision`."""

    resolved: Resolved
    reason: str = ""
    is_auto: bool = False
    loaded: LoadedModel | None = None
    name: str = "deepspeed"
    draws_timeline: bool = False
    shortage: str = ""
    """Left to the planner, which counts DeepSpeed's copies."""

    @property
    def settings(self) -> RunSettings:
        """Settings that were resolved for the run."""
        return self.resolved.settings

    @property
    def notes(self) -> tuple[str, ...]:
        """A line per choice."""
        return self.resolved.built.notes

    @property
    def nvme_path(self) -> str | None:
        """The folder that takes what is offloaded to the drive."""
        return self.resolved.built.offload.nvme_path

    @property
    def state_format(self) -> str:
        """Format of the optimizer states."""
        return self.resolved.built.offload.states

    @property
    def layout(self) -> DeepSpeedLayout:
        """Layout of the run, as the planner counts it."""
        run = self.resolved.run
        num_gpus = run.world_size if run.device == "cuda" else 1
        return deepspeed_layout(self.resolved.built.offload, self.settings, num_gpus)

    def words(self) -> list[str]:
        """Lines to show before anything is read or built."""
        built = self.resolved.built
        is_ours = built.offload.staged and self.nvme_path is not None
        slow_drive = [note for note in built.notes if "Warning:" in note]
        homes = {"none": "on the device", "cpu": "in RAM", "nvme": f"on NVMe ({built.offload.nvme_path})"}
        return [
            *(f"WARNING: {warning}" for warning in dict.fromkeys([*built.warnings, *slow_drive])),
            f"engine: ZeRO stage {built.offload.stage}, optimizer states {homes[built.offload.optimizer]}, parameters "
            f"{homes[built.offload.params]}",
            *([f"engine: {choose_verification(built.offload.nvme_checksums).words}"] * is_ours),
        ]

    def record(self) -> dict[str, Any]:
        """Plain values for plan.json."""
        return {"deepspeed": self.resolved.built.config, "offload": asdict(self.resolved.built.offload)}

    def forget(self) -> None:
        """Remove the folder that was made on the drive to try it, unless a run of that name is there."""
        if self.nvme_path is not None:
            with suppress(OSError):
                Path(self.nvme_path).rmdir()

    def open(self, model: ModelSettings, tokenizer: Any, say: Callable[[str], None]) -> Engine:
        """Load the model, partitioned under ZeRO-3, and make the engine."""
        return build_engine(self.resolved, model, tokenizer, self.loaded, say=say)


def decide_deepspeed(
    settings: RunSettings, model: ModelSettings, host: Host, tokenizer: Any, loaded: LoadedModel | None
) -> DeepSpeedDecision:
    """Rank 0 decides (free space and drives are looked at once); the others follow."""
    init_process_group(host.has_cuda, host.local_rank)
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", settings.world_size))
    run = RunFacts(
        world_size=settings.world_size,
        local_world_size=int(local),
        device="cuda" if host.has_cuda else "cpu",
        run_name=host.run_name,
        ram_available_bytes=host.ram_available_bytes,
    )
    resolved, loaded = resolve(settings, model, run, tokenizer, loaded)
    if run.world_size > 1:
        shared = [resolved.built]
        torch.distributed.broadcast_object_list(shared, src=0)
        resolved = replace(resolved, built=shared[0].of_rank(max(0, host.local_rank)))
    return DeepSpeedDecision(resolved, loaded=loaded)
