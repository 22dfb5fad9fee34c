"""An embedder of sentence-transformers, streamed by a plain argument."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModel

from outcore.hf import OutcoreConfig
from outcore.model.trial import shrink_config
from tests.hf.callers import ROWS, arguments, assert_same, tokenizer

st: Any = pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("sizes", [None, [16, 8]], ids=["in-batch negatives", "matryoshka"])
def test_its_trainer_leaves_the_same_bits(sizes: list[int] | None, tmp_path: Path) -> None:
    from sentence_transformers import losses, models

    config = shrink_config(AutoConfig.for_model("qwen3"))
    config.vocab_size = len(tokenizer())
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = Dataset.from_list([{"anchor": f"hello {i}", "positive": f"world {i} test"} for i in range(ROWS)])
    found = []
    for name, kwargs in {"plain": {}, "streamed": {"quantization_config": OutcoreConfig()}}.items():
        body = models.Transformer(str(tmp_path / "model"), model_kwargs={"dtype": "float32", **kwargs})
        model = st.SentenceTransformer(modules=[body, models.Pooling(config.hidden_size)], device="cpu")
        loss: Any = losses.MultipleNegativesRankingLoss(model)
        trainer = st.SentenceTransformerTrainer(
            model=model,
            args=arguments(st.SentenceTransformerTrainingArguments, tmp_path / name, 6),
            train_dataset=rows,
            loss=loss if sizes is None else losses.MatryoshkaLoss(model, loss, [config.hidden_size, *sizes]),
        )
        torch.manual_seed(7)
        trainer.train()
        seen = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((seen, {key: tensor.clone() for key, tensor in model.state_dict().items()}))
    assert_same(*found)
