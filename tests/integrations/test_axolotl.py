"""axolotl's plugin beside what axolotl calls (its own package takes a GPU's worth of others, and is stood in for)."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.hf.layer import is_streamed
from tests.hf.callers import tiny


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "outcore.integrations.axolotl", raising=False)
    return importlib.import_module("outcore.integrations.axolotl").OutcorePlugin()


def settings(plugin: Any, **keys: Any) -> SimpleNamespace:
    """An axolotl configuration, with the plugin's keys as its own class reads them."""
    module, _, name = plugin.get_input_args().rpartition(".")
    args = getattr(importlib.import_module(module), name)(**keys)
    return SimpleNamespace(load_in_4bit=False, load_in_8bit=False, device_map="auto", **args.model_dump())


def test_the_model_is_loaded_into_ram_and_streamed_before_adapters(plugin: Any) -> None:
    cfg = settings(plugin, outcore_vram_gib=6.5, outcore_quantize="nf4")
    plugin.pre_model_load(cfg)
    assert cfg.device_map == "cpu"
    model = tiny()
    plugin.post_model_build(cfg, model)
    assert any(is_streamed(module) for module in model.modules())
    with pytest.raises(RuntimeError, match="packed in nf4"):
        model.half()


def test_another_packing_is_refused(plugin: Any) -> None:
    cfg = settings(plugin)
    cfg.load_in_4bit = True
    with pytest.raises(ValueError, match="outcore_quantize: nf4"):
        plugin.pre_model_load(cfg)
