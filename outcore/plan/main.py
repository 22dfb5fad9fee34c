"""`outcore plan`: will this model fit, how fast will it be, what limits it. Weights are never loaded.

    outcore plan llama-8b --machine rtx4070-laptop
    outcore plan Qwen/Qwen3-4B --lora_r 16 --json
    outcore plan --infer llama-70b --aim throughput
    outcore plan --model llama-8b --machine rtx3090 --upgrade     (what to buy)
    outcore plan --infer my-run     (final_model/my-run or its checkpoints, as outcore chat takes it)
    outcore plan --efficiency       (the ZeRO-Infinity paper's formulas with this machine's rates)

Exit code: 0 the plan fits, 1 it does not, 2 wrong usage or a missing, stale or damaged profile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from outcore.common.classes import same_named
from outcore.common.quantities import GIB, format_gib
from outcore.common.words import names_of
from outcore.config.fields import is_address
from outcore.machine.offload import slow_drive_warning
from outcore.model import named_config, resolve_shape
from outcore.plan.answer.advice import Advice, Upgrade, advise, beside_one, upgrade_lines, upgrades
from outcore.plan.answer.command import Said, check_undecided, command, kept, notes
from outcore.plan.answer.show import WholeRun, whole_run
from outcore.plan.choose import PlanAnswer, choose_or_change
from outcore.plan.fields import NAMED_ELSEWHERE, SOURCES, PlanConfig, parse_plan
from outcore.plan.hardware import Hardware, Overrides
from outcore.plan.inference import DoesNotFit, InferencePlan, plan_inference, to_json, words_of
from outcore.plan.learned import known_rates, last_time
from outcore.plan.methods import ROLLED, MethodPlan, RolloutSize, plan_method
from outcore.plan.profile import RunRequest, load_hardware
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import ROLLOUT_ANSWERS, ROLLOUT_TOKENS


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    try:
        args = parse_plan(argv)
        if args.efficiency:
            return _efficiency(args)
        return _plan(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"outcore plan: {error}", file=sys.stderr)
        return 2


def _model_of(config: PlanConfig) -> str | None:
    """Preset, folder, config file or hub id, whichever setting named it."""
    infer = config.infer if config.infer != NAMED_ELSEWHERE else None
    return infer or next((value for name in SOURCES if (value := getattr(config, name))), None)


@dataclass(frozen=True)
class Asked:
    """A plan and what belongs to it."""

    answer: PlanAnswer
    advice: Advice
    hardware: Hardware
    command: str
    """The command that makes the plan a run."""
    whole: WholeRun | None = None
    """Length of the whole run; None where nobody said it."""
    upgrades: tuple[Upgrade, ...] | None = None
    """Purchases and what they gain; None where nobody asked."""

    def show(self, file: IO[str] | None = None) -> None:
        """Print it."""
        from outcore.plan.answer.show import show

        show(self.answer, self.advice, self.hardware, run_it=self.command, whole=self.whole, file=file)
        if self.upgrades is not None:
            print("\n".join(upgrade_lines(self.upgrades)), file=file)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        from outcore.plan.answer.show import to_json

        whole = None if self.whole is None else self.whole.to_dict()
        told = {"command": self.command, "run": whole}
        if self.upgrades is not None:
            told["upgrades"] = [asdict(one) | {"is_enough": one.is_enough} for one in self.upgrades]
        return to_json(self.answer, self.advice, self.hardware) | told


def answer_to(args: PlanConfig) -> Asked:
    """The plan of a training run by its flags. ValueError for what cannot be planned."""
    if args.method != "sft":
        raise ValueError(f"method {args.method}: outcore plan MODEL --method {args.method} forecasts it.")
    check_undecided(args)
    hardware, shape = _hardware(args), _shape(args)
    if shape.seeing_params:
        raise ValueError(f"{shape.name} is an image-text model: outcore plan {shape.name} forecasts its training.")
    request = _request(args, hardware)
    if args.lora_r:
        shape = shape.with_lora(args.lora_r).packed(args.quantize, published=_published(args)[0])
    answer = choose_or_change(shape, request, hardware)
    advice = advise(shape, request, hardware, answer.plan)
    if answer.plan.uses_drive and (
        slow := slow_drive_warning("the drive", hardware.drive_read_gb_per_s, hardware.drive_write_gb_per_s)
    ):
        hardware = replace(hardware, notes=(*hardware.notes, slow))
    if taught := last_time(answer.plan, hardware):
        hardware = replace(hardware, notes=(*hardware.notes, taught))
    if beside := beside_one(shape, request, hardware, answer.plan):
        hardware = replace(hardware, notes=(*hardware.notes, beside.words()))
    dataset = args.dataset if args.dataset != PlanConfig.dataset else ()
    model, has_adapters = _model_of(args) or "", args.lora_r > 0
    source = next(name for name in SOURCES if getattr(args, name))
    said = Said(source, model, dataset, args.nvme_offload_path, args.trust_remote_code, kept(args), has_adapters)
    hardware = replace(hardware, notes=(*hardware.notes, *notes(request, said)))
    bought = upgrades(shape, request, hardware, answer.plan) if args.upgrade else None
    return Asked(answer, advice, hardware, command(answer.plan, request, said), whole_run(args, answer.plan), bought)


def method_answer(args: PlanConfig) -> MethodPlan:
    """The plan of another method than sft by its flags. ValueError for what cannot be planned."""
    if args.upgrade:
        raise ValueError(f"upgrade: not with --method {args.method}; it is of --method sft.")
    hardware, shape = _hardware(args), _shape(args)
    if shape.seeing_params and args.method != "sft":
        raise ValueError(f"method {args.method}: image-text models are trained on answers alone; leave it out.")
    if args.lora_r:
        shape = shape.with_lora(args.lora_r).packed(args.quantize)
    rolled = None
    if args.method in ROLLED:
        sizes = args.num_generations or ROLLOUT_ANSWERS, args.max_completion_length or ROLLOUT_TOKENS
        teacher = None if is_address(args.teacher) else args.teacher
        reader = teacher and resolve_shape(teacher, trust_remote_code=args.trust_remote_code)
        rolled = RolloutSize(*sizes, refers=args.beta is not None, reader=reader or None)
    method = "pictures" if shape.seeing_params else args.method
    return plan_method(method, shape, _request(args, hardware), hardware, rolled)


def _plan(args: PlanConfig) -> int:
    if args.infer is not None:
        return _infer(args)
    if args.method != "sft" or (_model_of(args) is not None and _shape(args).seeing_params):
        found = method_answer(args)
        print(json.dumps(found.to_dict(), indent=2) if args.json else "\n".join(found.words))
        return 0 if found.fits else 1
    asked = answer_to(args)
    if args.json:
        print(json.dumps(asked.to_dict(), indent=2))
    else:
        asked.show()
    return 0 if asked.answer.plan.fits else 1


def _efficiency(args: PlanConfig) -> int:
    from outcore.plan.answer.efficiency import efficiency_json, efficiency_lines

    hardware = _machine(args)
    print(json.dumps(efficiency_json(hardware), indent=2) if args.json else "\n".join(efficiency_lines(hardware)))
    return 0


def _hardware(args: PlanConfig) -> Hardware:
    if _model_of(args) is None:
        from outcore.model import PRESETS

        raise ValueError(
            f"Name a model: a folder, a hub id, a config file or one of {', '.join(PRESETS)} (outcore plan MODEL)."
        )
    return _machine(args)


def _machine(args: PlanConfig) -> Hardware:
    limits_gib = [limit for limit in (args.ram_gib, args.ram_budget_gib) if limit is not None]
    said: dict[str, Any] = {**same_named(Overrides, args, "may_add_gpus"), "ram_gib": min(limits_gib, default=None)}
    overrides = Overrides(**said, may_add_gpus=args.nominal)
    return load_hardware(args.machine, overrides, allow_nominal=args.nominal)


def _shape(args: PlanConfig) -> ModelShape:
    model, place = _model_of(args) or "", _place(args)
    shape = resolve_shape(
        place,
        lora_target_modules=args.lora_target_modules,
        use_dora=args.use_dora,
        modules_to_save=names_of(args.lora_modules_to_save),
        trust_remote_code=args.trust_remote_code,
    )
    return shape if place == model else replace(shape, name=model)


@dataclass(frozen=True)
class AskedAnswers:
    """A plan of answers, for people and as data."""

    plan: InferencePlan
    words: Callable[[], list[str]]
    """Makes its lines, with what changes would give: these are plans of their own."""


def answers_to(args: PlanConfig) -> AskedAnswers:
    """The plan of answers by its flags. DoesNotFit, and ValueError for what cannot be planned."""
    hardware, shape = _hardware(args).for_answers(), _shape(args)
    published, ends = _published(args)
    if shape.seeing_params:
        raise ValueError(
            f"{shape.name} is an image-text model: its answers about pictures are not forecast. Its text has "
            f"{format_gib(2 * shape.base_params)} in 16 bits, its tower and projector "
            f"{format_gib(2 * shape.seeing_params)}."
        )
    shape = replace(shape, packed_ends=ends)
    asked: dict[str, Any] = {
        "preset": args.aim,
        "precision": _precision(args, hardware),
        "context": args.context,
        "kv_format": args.kv_format,
        "quantize": published or args.infer_quantize,
        "cpu_tokens": args.cpu_tokens,
        "expert_cache_gib": args.expert_cache_gib,
        "cpu_rates": known_rates(hardware),
    }
    try:
        plan = plan_inference(shape, hardware, **asked)
    except DoesNotFit as error:
        raise DoesNotFit(f"{shape.name} on {hardware.name}: does not fit. {error}") from error
    return AskedAnswers(plan, lambda: words_of(plan, **asked))


def _infer(args: PlanConfig) -> int:
    try:
        asked = answers_to(args)
    except DoesNotFit as error:
        print(error)
        return 1
    print(json.dumps(to_json(asked.plan), indent=2) if args.json else "\n".join(asked.words()))
    return 0


def _published(args: PlanConfig) -> tuple[str, tuple[str, str]]:
    """Formats in which the checkpoint has most of its weights, and embedding and head; '' for 16 bits."""
    from outcore.model import PRESETS

    name = _place(args)
    if name in PRESETS:
        return PRESETS[name].packed, ("", "")
    from outcore.formats.checkpoint import formats_of_ends, usual_format
    from outcore.model.facts import quantization_of

    packed = quantization_of(named_config(name, args.trust_remote_code))
    return ("", ("", "")) if packed is None else (usual_format(packed) or "", formats_of_ends(packed))


def _place(args: PlanConfig) -> str:
    """Name or folder of the model's configuration. Beside --infer a run is a model, too."""
    from outcore.model import PRESETS

    name = _model_of(args) or ""
    if args.infer is None or name in PRESETS:
        return name
    from outcore.checkpoint.export import configured

    return configured(name)


def _precision(config: PlanConfig, hardware: Hardware) -> Any:
    """bf16, or fp32 on a CPU, as a run and a start choose."""
    usual = "fp32" if hardware.is_cpu else "bf16"
    return usual if config.precision == "auto" else config.precision


def _request(config: PlanConfig, hardware: Hardware) -> RunRequest:
    micro = config.per_device_train_batch_size
    return RunRequest(
        seq_length=config.seq_length,
        micro_batch=None if micro == "auto" else micro,
        accumulation=config.gradient_accumulation_steps,
        engine=config.engine or "auto",
        zero_stage=config.zero_stage,
        residency=config.residency,
        state_format=None if config.state_format == "auto" else config.state_format,
        optimizer=config.optimizer,
        precision=_precision(config, hardware),
        activation_checkpointing=config.activation_checkpointing is not False,
        max_grad_norm=1.0 if config.max_grad_norm is None else config.max_grad_norm,
        staging_bytes=int(config.staging_gib * GIB) if config.staging_gib is not None else None,
        save_total_limit=config.save_total_limit,
        checkpoints_elsewhere=config.checkpoints_elsewhere,
    )
