"""A tiny model, an adapter for it, and a history with two finished evaluations."""

import pytest

from tests.evaluate.running import Evaluation, record_of, result_of
from tests.infer.models import save_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a model."""
    folder = tmp_path_factory.mktemp("evaluated") / "tiny"
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def adapter(tiny, tmp_path_factory):
    """Folder of a LoRA adapter that changes what the model says."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    folder = tmp_path_factory.mktemp("evaluated") / "adapter"
    get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.fixture
def evaluation(tiny, tmp_path, capsys):
    """`outcore evaluate` of the tiny model with a history of its own."""
    return Evaluation(tiny, tmp_path / "logs/evaluations", capsys)


@pytest.fixture
def history(tmp_path):
    """A history with two evaluations: the second got one more document right and one wrong."""
    from outcore.evaluate.history import History

    found = History(tmp_path / "logs" / "evaluations")
    for name, values in (("eval-a", (1.0, 0.0, 0.0, 1.0)), ("eval-b", (1.0, 1.0, 1.0, 0.0))):
        record = record_of(name)
        found.save(record)
        found.finish(record | {"status": "completed"}, *result_of(values))
    return found
