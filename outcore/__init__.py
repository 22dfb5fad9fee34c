"""outcore: train, run and evaluate language models far larger than the GPU, on one workstation.

    import outcore

    outcore.plan("llama-8b", lora_r=16).fits                       will it fit, how fast, what would help
    outcore.Trainer(outcore.TrainConfig(dataset=("chats.jsonl",))).train()
    outcore.LLM("my-run").chat([{"role": "user", "content": "Hello"}])

The names open their rooms when they are asked for: `import outcore` costs nothing."""

import sys
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore.api.llm import LLM, SamplingParams
    from outcore.api.loading import load
    from outcore.api.planning import plan
    from outcore.api.serving import serve
    from outcore.api.trainer import Trainer
    from outcore.config import TrainConfig
    from outcore.infer.opening import InferSettings as InferConfig

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": ("api.llm", "LLM"),
    "SamplingParams": ("api.llm", "SamplingParams"),
    "Trainer": ("api.trainer", "Trainer"),
    "TrainConfig": ("config", "TrainConfig"),
    "InferConfig": ("infer.opening", "InferSettings"),
    "OutcoreConfig": ("hf", "OutcoreConfig"),
    "stream": ("hf", "stream"),
    "load": ("api.loading", "load"),
    "plan": ("api.planning", "plan"),
    "serve": ("api.serving", "serve"),
}
"""Name -> (module, name in it)."""
_ROOMS = ("plan", "serve")
"""Names that are also rooms: whoever imports such a room has it bound here, so it is the room that can be called."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _opened(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])


def _opened(name: str) -> Any:
    module, own = _HOME_OF[name]
    return getattr(import_module(f"{__name__}.{module}"), own)


class _CalledRoom(ModuleType):
    """A room with a function of its own name: `outcore.plan(...)`."""

    def __call__(self, *args: Any, **said: Any) -> Any:
        return _opened(self.__name__.rpartition(".")[2])(*args, **said)

    @property
    def __signature__(self) -> Signature:
        return signature(_opened(self.__name__.rpartition(".")[2]))


class _Face(ModuleType):
    """This package, which makes such rooms callable when they are bound to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS and isinstance(value, ModuleType):
            value.__class__ = _CalledRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
