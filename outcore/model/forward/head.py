"""A causal language model taken apart by structure: decoder (tokens to hidden states) and head (hidden to logits).

The head is everything the model's own forward does after its decoder: projection, bias, scaling, soft-capping. It is
run on any slice of hidden states by calling that very forward on a shell: a second object that shares every weight
and submodule with the model, but whose decoder is a stub returning the given hidden states. The model itself is
never touched, so hooks (ZeRO-3), adapters and checkpoints see nothing of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outcore.model.forward.inputs import accepted_names


class DecoderOutput:
    """Output of `DecoderStub` for the model's forward: hidden states, router logits if given, None for all else."""

    def __init__(self, last_hidden_state: torch.Tensor, router_logits: Any = None):
        self.last_hidden_state = last_hidden_state
        self.router_logits = router_logits

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class DecoderStub(nn.Module):
    """Stands where the decoder stands and returns what it was given, whatever it is called with.

    Some models call an inner part of their decoder (OPT: `self.model.decoder(...)`): the decoder's own children are
    the stub again. Some read what it holds (Falcon-H1: `self.model.lm_head_multiplier`): plain attributes and buffers
    are the decoder's own; its parameters and methods are not here."""

    def __init__(self, output: DecoderOutput, decoder: nn.Module):
        super().__init__()
        self.output = output
        self.__dict__["_decoder"] = decoder  # not a submodule: its weights are not the stub's

    def __getattr__(self, name: str) -> Any:
        decoder = self.__dict__["_decoder"]
        if name in decoder._modules:
            return self
        for held in (decoder._buffers, vars(decoder)):
            if name in held:
                return held[name]
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> DecoderOutput:
        return self.output


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers (or user's) model under peft, DeepSpeed, DDP, torch.compile and LossModule wrappers."""
    while True:
        if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = model.get_base_model()  # pyright: ignore[reportCallIssue]
        elif type(model).__name__ == "OptimizedModule" and "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # pyright: ignore[reportAssignmentType]
        elif "network" in model._modules and type(model).__name__ == "LossModule":
            model = model._modules["network"]  # pyright: ignore[reportAssignmentType]
        elif type(model).__name__ in ("DeepSpeedEngine", "DistributedDataParallel") and "module" in model._modules:
            model = model._modules["module"]  # pyright: ignore[reportAssignmentType]
        else:
            return model


def find_decoder(causal: nn.Module) -> str | None:
    """Name of the direct child that turns tokens into hidden states: it holds the list of layers; None if not found."""
    prefix = getattr(causal, "base_model_prefix", None)
    if prefix and isinstance(causal._modules.get(prefix), nn.Module):
        return str(prefix)
    holders = [
        name
        for name, child in causal.named_children()
        if any(isinstance(inner, nn.ModuleList) and len(inner) > 0 for inner in child.modules())
    ]
    return holders[0] if len(holders) == 1 else None


class CausalParts:
    """The two halves of a causal language model. Cheap to make; holds references only."""

    def __init__(self, causal: nn.Module):
        """ValueError when the model has no single child that could be its decoder."""
        name = find_decoder(causal)
        if name is None:
            raise ValueError(f"{type(causal).__name__} has no single child module that holds its layers.")
        self.causal = causal
        self.decoder_name = name
        self._asks_for_rows = False
        """Whether the model's forward was seen to look at its input after its decoder."""

    @property
    def decoder(self) -> nn.Module:
        decoder = self.causal._modules[self.decoder_name]
        assert decoder is not None
        return decoder

    @property
    def projection(self) -> nn.Module | None:
        """The module that multiplies by the head's weight, where the model names one."""
        name_it = getattr(self.causal, "get_output_embeddings", None)
        named = name_it() if callable(name_it) else None
        return named if isinstance(named, nn.Module) else None

    def _run_head(self, output: DecoderOutput, **kwargs: Any) -> Any:
        """The model's forward without an input. One that fails because it asks the absent input for something (Gemma 4:
        how long its rows are) gets the hidden states as `inputs_embeds`, from then on at once."""
        shell = object.__new__(type(self.causal))
        shell.__dict__.update(self.causal.__dict__)
        stub = DecoderStub(output, self.decoder)
        shell.__dict__["_modules"] = {**self.causal._modules, self.decoder_name: stub}
        kwargs |= {"input_ids": None, "use_cache": False}
        rows = {"inputs_embeds": output.last_hidden_state}  # of the right shape; the stub ignores them
        if self._asks_for_rows:
            return shell.forward(**kwargs, **rows)
        try:
            return shell.forward(**kwargs)
        except AttributeError as error:
            if error.obj is not None or "inputs_embeds" not in accepted_names(self.causal)[0]:
                raise
        result = shell.forward(**kwargs, **rows)
        self._asks_for_rows = True
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, n, H] -> logits [1, n, V], by the model's own code after its decoder."""
        return self._run_head(DecoderOutput(hidden)).logits

    def router_loss(
        self, hidden: torch.Tensor, router_logits: Any, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The model's own load-balancing loss (without its coefficient) from the decoder's router logits."""
        output = DecoderOutput(hidden[:1, :1].detach(), router_logits)
        result = self._run_head(output, output_router_logits=True, attention_mask=attention_mask)
        if getattr(result, "aux_loss", None) is None:
            raise RuntimeError(
                f"{type(self.causal).__name__} was asked for router logits, but returned no auxiliary loss."
            )
        return result.aux_loss
