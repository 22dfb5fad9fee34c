"""What people need to choose is where they look: `--help` of the real parser, the first page, the guide."""

import re

import pytest

from outcore.config import FIELDS
from outcore.engine.stream.settings import StreamSettings, StreamSizes
from outcore.train.configure import parse_config
from tests.docs.parsers import parse_command
from tests.forked import ROOT

HELP = {
    "nvme_offload_path": ("up to 9 times the 16-bit model", "Windows: not C:"),
    "nvme_offload_optimizer": ("8 to 12 B a parameter", "read and written each step"),
    "nvme_offload_params": ("2 B a parameter", "read twice a step"),
    "nvme_offload_gradients": ("Slower", "saves 2 B of RAM per parameter"),
    "offload_optimizer": ("up to 12 B of RAM a parameter", "the CPU updates them"),
    "offload_params": ("2 B of RAM a parameter", "to the GPU twice a step"),
    "aio_block_size": ("524288 for SATA or USB SSDs", "1048576 for NVMe", "2097152 also on PCIe 4.0"),
    "aio_queue_depth": ("4 for SATA or USB SSDs", "8 to 16 for NVMe", "32 for several drives"),
    "pin_memory": ("false below 16 GB of RAM",), "staging_gib": ("pinned memory",), "write_combined": ("upload lane",),
    "lane_slots": ("slots of a transfer lane",), "lane_slot_bytes": ("bytes of a slot",),
    "residency": ("nothing goes to a drive",),
}  # fmt: skip
"""Flag -> what its help says."""


def test_help_says_what_each_offload_costs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help", "all"])
    text = capsys.readouterr().out
    starts = [(match.start(), match[1]) for match in re.finditer(r"^  --(\w+)", text, re.MULTILINE)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    told = {name: " ".join(text[start:end].split()) for (start, name), end in zip(starts, ends, strict=True)}
    assert set(told) >= set(FIELDS)
    assert [(name, word) for name, said in HELP.items() for word in said if word not in told[name]] == []


FLAGS = {
    "max_grad_norm": "max_grad_norm", "states": "state_format", "accumulate": "grad_accum_dtype",
    "betas": "adam_beta1", "eps": "adam_epsilon", "state_ram_bytes": "ram_budget_gib",
    "gradient_bytes": "ram_budget_gib", "weight_ram_bytes": "ram_budget_gib",
    "packed_attention": "packing", "nvme_path": "nvme_offload_path",
    "step_tokens": "gradient_accumulation_steps", "row_tokens": "seq_length", "resident_bytes": "resident_gib",
    "ahead_bytes": "ahead_gib", "staging_bytes": "staging_gib",
    "slot_bytes": "lane_slot_bytes", "num_slots": "lane_slots", "storage": "storage_engine",
    "initial_loss_scale": "initial_scale_power",
}  # fmt: skip
"""Setting of the engine -> the flag that sets it, where its name is another."""


def test_every_setting_of_an_engine_is_a_flag() -> None:
    settings = set(StreamSettings.__dataclass_fields__) - set(StreamSizes.__dataclass_fields__)
    assert {name for name in settings if FLAGS.get(name, name) not in FIELDS} == set()
    assert set(FLAGS) <= settings


def test_the_first_page_names_the_commands_and_what_reaches_100_b() -> None:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert any("`deepspeed --num_gpus=1 train_model.py`" in row for row in rows)
    assert "--zero_stage infinity --nvme_offload_path" in text
    assert re.search(r"50 to 100 B\s+on a laptop .* adapters, yes; full training only with compact states", text)
    parse_command(
        ["deepspeed", "--num_gpus=1", "train_model.py", "--zero_stage", "infinity", "--nvme_offload_path", "/d"]
    )


def test_windows_has_its_page() -> None:
    text = (ROOT / "docs" / "windows.md").read_text(encoding="utf-8")
    for words in ("**WSL2**: `wsl --install", ".wslconfig", "**Windows, native**", "C: is the"):
        assert words in text


@pytest.mark.parametrize("words", [
    "**Linux, native**",
    "deepspeed --include localhost:0,1 train_model.py",
    "`pip install -r requirements.txt` (the pins for CUDA 12)",
    "both leave out driver, compiler and\n  test tools", "with 6 GB", "16 GB of RAM", "an SSD",
])  # fmt: skip
def test_the_guide_has_set_up_devices_and_hardware(words: str) -> None:
    assert words in (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
