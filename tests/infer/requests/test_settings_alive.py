"""Each setting of answers is alive: another value than its default places or says something else, or is refused."""

import json
import re
import shutil
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from outcore.infer.opening import InferSettings, open_engine
from tests.forked import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
USUAL = {"context": 128, "ram_gib": 1.0, "device": "cpu"}
LITTLE = {"ram_gib": 0.0008, "max_sequences": 1}
FLIPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "preset": ("throughput", {}), "device": ("cuda:9", {}), "precision": ("bf16", {}), "adapter": ("{root}/none", {}),
    "adapters": (("{root}/none",), {}), "quantize": ("int8", {}), "context": (64, {}), "max_sequences": (3, {}),
    "pass_tokens": (32, {}), "chunk_tokens": (16, {}), "kv_format": ("int8", {}),
    "kv_home": ("ram", {}), "kv_gib": (0.001, {}), "vram_gib": (1.0, {}), "ram_gib": (0.0001, {}),
    "nvme_path": (("{root}/drive",), LITTLE), "pin_gib": (1.0, {}), "pin_memory": (False, {}), "buffer_mib": (1.0, {}),
    "num_layer_buffers": (2, {}), "prefetch": (1, {}), "draft_model": ("{model}", {}),
    "prefix_path": ("{root}/kept", {}), "draft_tokens": (0, {"draft_model": "{model}"}), "prefix_gib": (1.0, {}),
    "cpu_tokens": (0, {}),
    "expert_cache_gib": (1.0, {}), "deterministic": (True, {}), "scores_only": (True, {}),
    "pictures": (True, {}),
    "share_prefixes": (False, {"prefix_path": "{root}/kept"}),
}  # fmt: skip
"""Another value, and other settings that both have."""
ELSEWHERE = {"compile": "infer/test_compiled.py", "page_tokens": "infer/parts/test_drive.py"}
"""Those that take long, or show in pages only -> the file of tests that has them."""


def opened(settings: dict[str, Any], folder: Path, root: Path) -> dict[str, Any]:
    """What a model that is opened so says and how it is placed; or the refusal."""

    def filled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(filled, value))
        return value.format(root=root, model=folder) if isinstance(value, str) else value

    said: list[str] = []
    try:
        told = InferSettings(**{name: filled(value) for name, value in {**USUAL, **settings}.items()})
        with closing(open_engine(str(folder), told, said.append)) as model:
            found = asdict(model.placement)
    except (ValueError, RuntimeError) as error:
        return {"refused": str(error)}
    return {**found, "said": [re.sub(r"[\d.]+ m?s\b", "#", line) for line in said]}


def test_every_setting_is_turned() -> None:
    assert sorted([*FLIPS, *ELSEWHERE, "trust_remote_code"]) == sorted(field.name for field in fields(InferSettings))
    for name, place in ELSEWHERE.items():
        assert name in (ROOT / "tests" / place).read_text(encoding="utf-8")


def test_the_same_settings_open_the_same(tiny_folder, tmp_path: Path) -> None:
    assert opened({}, tiny_folder[0], tmp_path) == opened({}, tiny_folder[0], tmp_path)


@pytest.mark.more(after=4)
@pytest.mark.parametrize("name", FLIPS)
def test_a_setting_of_answers_is_alive(name: str, tiny_folder, tmp_path: Path) -> None:
    value, beside = FLIPS[name]
    before = opened(beside, tiny_folder[0], tmp_path)
    after = opened({**beside, name: value}, tiny_folder[0], tmp_path)
    assert before != after


def test_code_of_a_model_is_run_where_it_is_trusted(tiny_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder[0], tmp_path / "own"))
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    config = {**json.loads((folder / "config.json").read_text()), "model_type": "own", "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    assert "custom code" in opened({}, folder, tmp_path)["refused"]
    assert "said" in opened({"trust_remote_code": True}, folder, tmp_path)
