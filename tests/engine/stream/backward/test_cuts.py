"""However the rows of a step are cut into micro-batches and shared by ranks: the same rows, loss and gradients."""

import pytest
import torch
from safetensors.torch import load_file

from outcore.data import BatchStream
from tests.data.layout.test_packing import dataset_of
from tests.engine.stream.training import LR, fixtures

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 6
CUTS = (1, 2, 3, 6)


def _dataset(kind: str):
    return dataset_of([4 + 5 * n % 13 for n in range(16)], 16, kind)  # ragged rows


def _known(batch):
    """With tokens of the tiny vocabulary: the data set numbers its tokens."""
    labels = batch["labels"]
    return {**batch, "input_ids": batch["input_ids"] % 97, "labels": torch.where(labels < 0, labels, labels % 97)}


def _steps(dataset, micro: int, ranks: int, count: int = 3):
    """The rows of some steps, each step's in order."""
    streams = [BatchStream(dataset, micro, rank, ranks) for rank in range(ranks)]
    found = []
    for _ in range(count):
        rows = []
        for _ in range(ROWS // micro // ranks):
            for stream in streams:
                rows += stream.next_rows().tolist()
                next(stream)
        found.append(sorted(rows))
    return found


def test_a_steps_rows_are_the_same_for_every_cut_and_number_of_ranks():
    dataset = _dataset("padded")
    found = [_steps(dataset, micro, ranks) for micro in CUTS for ranks in (1, 2, 3) if ROWS // micro % ranks == 0]
    assert len(found) == 8 and all(steps == found[0] for steps in found)


def test_a_run_that_resumes_amid_an_epoch_with_another_cut_reads_on_where_it_was():
    dataset = _dataset("padded")
    whole = _steps(dataset, 6, 1, 4)
    first = BatchStream(dataset, 6)
    next(first)
    for micro in CUTS:
        resumed = BatchStream(dataset, micro)
        resumed.load_state_dict(first.state_dict())
        rows = []
        for _ in range(ROWS // micro):
            rows += resumed.next_rows().tolist()
            next(resumed)
        assert sorted(rows) == whole[1] and 0 < first.rows_seen < len(dataset)


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("model", "kind"), [("llama", "padded"), ("llama", "packed"), ("mixtral", "padded")])
def test_loss_and_gradients_are_the_same_for_every_cut(build, tmp_path, model, kind):
    """In fp32 to rounding: sums come in another order. The first moments are a tenth of the gradients."""
    found = {}
    for micro in CUTS:
        engine, stream = build(model), BatchStream(_dataset(kind), micro)
        result = engine.train_step([_known(next(stream)) for _ in range(ROWS // micro)], LR)
        folder = tmp_path / str(micro)
        folder.mkdir()
        engine.save(folder, lambda path, crc: None)
        moments = {}
        for path in sorted(folder.glob("exp_avg-*.safetensors")):
            moments |= load_file(path)
        assert set(moments) == {name for name, _ in engine.loaded.model.named_parameters()}
        found[micro] = result, torch.cat([moments[name].flatten().double() for name in sorted(moments)])
    (whole, gradients), *others = (found[micro] for micro in reversed(CUTS))
    for result, other in others:
        assert result.tokens == whole.tokens
        assert result.loss == pytest.approx(whole.loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
        assert float((other - gradients).norm() / gradients.norm()) < 1e-6
