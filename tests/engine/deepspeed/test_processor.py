"""A start of DeepSpeed asks once what the processor can do."""

import cpuinfo
import pytest
from deepspeed.ops.op_builder import CPUAdamBuilder

from outcore.engine.deepspeed import environment


def test_the_processor_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders and optimizer asked anew, 1.2 s each."""
    asked = []

    def ask() -> dict:
        asked.append(None)
        return {"arch": "X86_64", "flags": ["avx2"], "vendor_id_raw": "GenuineIntel"}

    monkeypatch.setattr(cpuinfo, "get_cpu_info", ask)
    environment.ask_processor_once()
    environment.ask_processor_once()  # of another engine
    builder = CPUAdamBuilder()
    assert builder.simd_width() == "-D__AVX256__" and builder.cpu_arch() and cpuinfo.get_cpu_info()["flags"]
    assert len(asked) == 1
