"""Your own model and loss: `--model_module my_model.py:build`.

    def build(config, tokenizer):                # config: a mapping of the run's model settings
        return model                             # an nn.Module, or
        return model, loss                       # loss(logits, labels) -> the loss of each token, or
                                                 # loss(model, batch) -> mean, or (sum, n_tokens)

The file is run as Python code: it is yours. See `examples/my_model.py` and docs/models.md."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from outcore.common.words import did_you_mean
from outcore.model.settings import ModelSettings
from outcore.model.source import windows_path_hint


def build_from_module(settings: ModelSettings, tokenizer: Any | None) -> tuple[nn.Module, Any]:
    """Load the file, call its function, check what comes back: a model, and its loss (of either kind) or None.

    ValueError says which part of the contract failed."""
    spec = str(settings.model_module)
    file_name, _, function_name = spec.rpartition(":")
    module = _load_file(file_name, spec)
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ValueError(
            f"model_module {spec!r}: {file_name} has no function {function_name!r}.{did_you_mean(function_name, own)} "
            f"It defines {', '.join(own) if own else 'no functions'}."
        )
    try:
        inspect.signature(function).bind({}, tokenizer)
    except TypeError as error:
        raise ValueError(
            f"model_module {spec!r}: {function_name}{inspect.signature(function)} cannot be called as "
            f"{function_name}(config, tokenizer): {error}."
        ) from error
    config = {
        **asdict_of(settings),
        "vocab_size": settings.vocab_size or (len(tokenizer) if tokenizer is not None else None),
    }
    try:
        result = function(config, tokenizer)
    except (MemoryError, OSError, torch.OutOfMemoryError):
        raise  # told in words wherever they come from
    except Exception as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__
        ]
        raise ValueError(
            f"model_module {spec!r}: {function_name} failed{f' in line {lines[-1]}' if lines else ''}: "
            f"{type(error).__name__}: {error}"
        ) from error
    model, loss_fn = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model_module {spec!r}: {function_name} must return a torch.nn.Module or a pair (module, loss function), "
            f"it returned {type(result).__name__}."
        )
    if loss_fn is not None:
        _check_loss(loss_fn, spec)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model_module {spec!r}: the model from {function_name} has no parameter that trains.")
    return model, loss_fn


def asdict_of(settings: ModelSettings) -> dict[str, Any]:
    """The settings as a plain dict (config_overrides, too)."""
    plain = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    plain["config_overrides"] = dict(settings.config_overrides)
    plain["lora"] = asdict(settings.lora) if settings.lora is not None else None
    return plain


def is_head_loss(loss_fn: Any) -> bool:
    """Whether a loss is one of each token's logits: its two parameters are called `logits` and `labels`."""
    return loss_fn is not None and list(inspect.signature(loss_fn).parameters)[:2] == ["logits", "labels"]


def _check_loss(loss_fn: Any, spec: str) -> None:
    if not callable(loss_fn):
        raise ValueError(
            f"model_module {spec!r}: the second value must be a function loss(logits, labels) or loss(model, batch), "
            f"it is {type(loss_fn).__name__}."
        )
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"model_module {spec!r}: the loss function cannot be called as loss(logits, labels) or loss(model, batch): "
            f"{error}."
        ) from error


def _load_file(file_name: str, spec: str) -> ModuleType:
    path = Path(file_name).expanduser()
    if not path.is_file():
        if hint := windows_path_hint(file_name):
            raise ValueError(f"model_module {spec!r} {hint}.")
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ValueError(f"model_module {spec!r}: there is no file {file_name!r}.{did_you_mean(path.name, siblings)}")
    loader_spec = importlib.util.spec_from_file_location(f"outcore_model_module_{path.stem}", path)
    if loader_spec is None or loader_spec.loader is None:
        raise ValueError(f"model_module {spec!r}: {file_name!r} is not a Python file (its name must end in .py).")
    module = importlib.util.module_from_spec(loader_spec)
    sys.modules[loader_spec.name] = module
    try:
        loader_spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(loader_spec.name, None)
        raise ValueError(
            f"model_module {spec!r}: {file_name} failed while loading: {type(error).__name__}: {error}"
        ) from error
    return module
