"""Modules that are trained whole beside adapters (peft's `modules_to_save`): an embedding, a head, norms.

peft trains a copy of each beside the frozen original, which nothing uses then. Here the module itself is trained: the
same numbers, without a second home and a second way over the link. An exported adapter holds them where peft looks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from outcore.common.words import did_you_mean


def is_called(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def lies_in(name: str, whole: dict[str, nn.Module]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in whole)


def modules_trained_whole(model: nn.Module, wanted: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that are trained whole, by path. ValueError for a name that the model lacks, and for a tied weight of
    which not every module is named: peft trains a copy of one then, which is tied no more."""
    modules = dict(model.named_modules(remove_duplicate=False))
    leaves = sorted({path.rpartition(".")[2] for path, module in modules.items() if module._parameters})
    found: dict[str, nn.Module] = {}
    for name in wanted:
        named = {path: module for path, module in modules.items() if path and is_called(path, name)}
        if not any(next(module.parameters(), None) is not None for module in named.values()):
            raise ValueError(
                f"lora modules_to_save: the model has no module {name!r} with weights.{did_you_mean(name, leaves)} "
                f"Its modules are called {', '.join(leaves[:20])}."
            )
        found |= named
    inside = {id(p) for module in found.values() for p in module.parameters()}
    outside = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in inside]
    for name, _ in outside:
        if not lies_in(name, found):
            raise ValueError(
                f"lora modules_to_save: {name} shares its weights with {', '.join(wanted)}, and training a copy of one "
                f"would untie them. Add {name.split('.')[-2]} as well: both stay tied and are trained."
            )
    return found


def train_whole(adapted: Any, whole: dict[str, nn.Module], names: tuple[str, ...]) -> None:
    """Train these modules in place: peft trains a copy beside the frozen original, which here would be a second home
    and a second way over the link for weights that nothing uses."""
    if not whole:
        return
    parameters = [p for module in whole.values() for p in module.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    config = adapted.peft_config["default"]
    config.modules_to_save = list(names)  # the exported adapter holds them where peft looks for them
    held: dict[int, int] = {}
    for _, parameter in adapted.named_parameters(remove_duplicate=False):
        held[id(parameter)] = held.get(id(parameter), 0) + 1
    config.ensure_weight_tying = any(held[id(parameter)] > 1 for parameter in parameters)


def settle_trained_modules(adapted: Any) -> None:
    """Put the modules that an adapter's file brings whole in place of the base's, where peft keeps both."""
    from peft.utils.other import ModulesToSaveWrapper

    wrapped = [(path, module) for path, module in adapted.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    for path, module in wrapped:
        parent, _, name = path.rpartition(".")
        setattr(adapted.get_submodule(parent), name, module.modules_to_save["default"])
    if wrapped and adapted.peft_config["default"].ensure_weight_tying:
        adapted.get_base_model().tie_weights()
