"""Which model to train, at what precision, and how it is adapted: the model's part of the configuration.

Everything that can be judged without touching the disk or the network is judged here, when the settings are made;
the rest (does the folder hold a model, does the hub answer) by `outcore.model.source` before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outcore.common.words import did_you_mean

if TYPE_CHECKING:
    import torch

PRECISIONS = ("bf16", "fp16", "fp32")
ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
LORA_INIT = ("kaiming", "gaussian")
LORA_BIAS = ("none", "all", "lora_only")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = did_you_mean(str(value), allowed, count=1)
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}.{hint}")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters through peft: the base weights are frozen, two thin matrices beside each are trained."""

    r: int = 16
    """Rank of the adapters: each adapted weight [out, in] gets r * (in + out) trainable numbers."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / r."""
    dropout: float = 0.0
    """Dropout on the adapter's input while training."""
    target_modules: str | tuple[str, ...] = "auto"
    """"auto" adapts every linear layer but the head; otherwise module names such as ("q_proj", "v_proj")."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapters, by the end of their names ("embed_tokens")."""
    use_dora: bool = False
    """A trained length for each row of an adapted weight; the adapter turns its direction."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead of alpha / r (rank-stabilized)."""
    init: str = "kaiming"
    """Distribution that A is drawn from: kaiming (peft's default) or gaussian (of deviation 1 / r); B is 0."""
    bias: str = "none"
    """Biases that train: none, all, or those of adapted layers only (lora_only)."""

    def __post_init__(self) -> None:
        if not isinstance(self.r, int) or isinstance(self.r, bool) or self.r < 1:
            raise ValueError(
                f"lora r is {self.r!r}, but the rank must be a whole number of at least 1 (8 to 64 is usual)."
            )
        if not self.alpha > 0:
            raise ValueError(f"lora alpha is {self.alpha!r}, but must be above 0 (often twice the rank).")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora dropout is {self.dropout!r}, but must lie in [0, 1).")
        _one_of("lora bias", self.bias, LORA_BIAS)
        _one_of("lora init", self.init, LORA_INIT)
        if isinstance(self.target_modules, str):
            names = [name.strip() for name in self.target_modules.split(",") if name.strip()]
            value: str | tuple[str, ...] = "auto" if names in (["auto"], ["all-linear"]) else tuple(names)
            object.__setattr__(self, "target_modules", value)
        else:
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        if not self.target_modules:
            raise ValueError(
                'lora target_modules is empty: name at least one module, or use "auto" for every linear layer.'
            )


@dataclass(frozen=True)
class ModelSettings:
    """Model: where it comes from (exactly one of four sources) and how it is made ready for training."""

    model_name_or_path: str | None = None
    """A hub id ("Qwen/Qwen3-4B") or a local folder with config.json and safetensors weights."""
    preset: str | None = None
    """From scratch by the name of a shape; see `outcore.model.presets`."""
    config_file: str | None = None
    """From scratch by a transformers config (JSON or YAML with a model_type)."""
    model_module: str | None = None
    """Your own: "file.py:function"; see `outcore.model.hook`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless asked for: it is someone else's program."""
    precision: str = "bf16"
    """Type that weights and activations are computed in: bf16, fp16 or fp32."""
    attn_implementation: str = "auto"
    """transformers' attention: sdpa (torch's fused kernels), eager, flash_attention_2, ... auto: sdpa where the model
    has it, eager otherwise (Gemma 2, GPT-OSS)."""
    seq_length: int = 2048
    """Tokens per sample, checked against what the model can tell apart."""
    vocab_size: int | None = None
    """The tokenizer's size. Presets made for the embedded tokenizer take it; real shapes only grow to it."""
    lora: LoraSettings | None = None
    """Adapters instead of full fine-tuning."""
    quantize: str | None = None
    """Frozen matrices of layers are kept packed (nf4, int8) and expanded as they are used: beside adapters only."""
    neftune_noise_alpha: float | None = None
    """Noise on the input embeddings while training; None: none."""
    label_smoothing: float = 0.0
    """Share of each target's probability that is spread over the whole vocabulary."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    router_loss: str = "tokens"
    """Weight of a mixture's balancing loss: by each micro-batch's share of tokens, or whole for each micro_batch."""
    seed: int = 42
    """Initial weights from scratch and of adapters are a function of this and of parameter names alone."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the transformers config to replace, e.g. {"num_hidden_layers": 4}."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "config_overrides", MappingProxyType(dict(self.config_overrides)))
        for name in ("model_name_or_path", "preset", "config_file", "model_module"):
            value = getattr(self, name)
            if value is not None and not str(value).strip():
                raise ValueError(f"{name} is empty. Give a value or leave it out.")
        given = self.sources_given
        if len(given) != 1:
            what = f"got {' and '.join(given)}" if given else "got none"
            raise ValueError(
                f"A model needs exactly one source, {what}. Use one of --model_name_or_path (hub id or folder), "
                "--preset (a shape, from scratch), --config_file (your own shape, from scratch), "
                "--model_module (file.py:function)."
            )
        if self.preset is not None:
            from outcore.model.presets import check_preset_name

            check_preset_name(self.preset)
        if self.model_module is not None and ":" not in self.model_module:
            raise ValueError(
                f"model_module is {self.model_module!r}, but must be file.py:function, "
                "for example examples/my_model.py:build."
            )
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("router_loss", self.router_loss, ("tokens", "micro_batch"))
        _one_of("attn_implementation", self.attn_implementation, ATTENTION)
        if not isinstance(self.seq_length, int) or self.seq_length < 2:
            raise ValueError(f"seq_length is {self.seq_length!r}, but must be a whole number of at least 2 tokens.")
        if self.vocab_size is not None and self.vocab_size < 2:
            raise ValueError(f"vocab_size is {self.vocab_size!r}, but a vocabulary has at least 2 entries.")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed is {self.seed!r}, but must be a whole number of at least 0.")

    @property
    def sources_given(self) -> list[str]:
        """The names of the source fields that are set."""
        names = ("model_name_or_path", "preset", "config_file", "model_module")
        return [f"{name} {getattr(self, name)!r}" for name in names if getattr(self, name) is not None]

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the weights as they are computed with."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.precision]
