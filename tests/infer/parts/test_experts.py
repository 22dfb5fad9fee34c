"""Experts read as they are chosen: the same answers as with their layers, each read once a pass at most."""

from __future__ import annotations

import pytest

from outcore.infer import Request, Sampling
from outcore.infer.opening import InferSettings, open_engine
from tests.flow.models import needs
from tests.infer.models import prompts_of, save_tiny_model

PROMPTS = prompts_of(4, vocab=280)
FIELDS = {"num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
FIELDS |= {"intermediate_size": 256, "moe_intermediate_size": 256}
GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def found(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_tiny_model(made[family], family=family, **FIELDS)
        return made[family]

    return found


def answers(folder, look=lambda opened: None, **settings):
    """(tokens, scores) of the prompts."""
    opened = open_engine(str(folder), InferSettings(context=128, device="cpu", **{"ram_gib": 1, **settings}))
    try:
        sampling = Sampling(temperature=0, max_tokens=10, ignore_eos=True)
        requests = [Request(str(i), tuple(prompt), sampling) for i, prompt in enumerate(PROMPTS)]
        found = {a.request: [c.token for c in a.tokens] for a in opened.engine.generate(requests)}
        scores = opened.engine.score(PROMPTS)
        look(opened)
        return [found[str(i)] for i in range(len(PROMPTS))], scores
    finally:
        opened.close()


FAMILIES = ["mixtral", "qwen3_moe", pytest.param("gpt_oss", marks=needs("gpt_oss"))]


@pytest.mark.parametrize(("quantize", "cpu_tokens"), [(None, 0), ("nf4", 0), ("nf4", 64)])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_experts_that_come_with_their_layers(folder_of, tmp_path, family, quantize, cpu_tokens):
    folder, seen = folder_of(family), []
    packing = {"quantize": quantize, "cpu_tokens": cpu_tokens}
    expected = answers(folder, **packing)

    def look(opened):
        cache = opened.weights.experts
        assert 0 < cache.num_slots == opened.placement.expert_slots < 3 * 8
        assert "read as they are chosen" in " ".join(opened.placement.lines())
        one = sum(piece.numel for piece in cache.forms[0].pieces) * cache.parts[0].layout.dtype.itemsize
        read, rest = divmod(cache.counts.read_bytes, one)
        assert not rest and read >= cache.counts.asked - cache.counts.hits  # some ahead, in vain
        seen.append((cache.num_slots, cache.counts))

    drive = {"nvme_path": (tmp_path,), "max_sequences": 2, "kv_gib": 0.0004, "pass_tokens": 32, "chunk_tokens": 16}
    drive |= {**packing, "ram_gib": 0.0022 if quantize else 0.0036}
    one_gib = (29952 if quantize else 198912) / GIB
    for count in (4, 8):
        found = answers(folder, look, expert_cache_gib=(count + 0.5) * one_gib, **drive)
        assert found[0] == expected[0]
        for mine, theirs in zip(found[1], expected[1], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3 if cpu_tokens else 2e-4)
    (few, with_few), (many, with_many) = seen
    assert few < many and with_few.hit_rate < with_many.hit_rate and with_few.read_bytes > with_many.read_bytes


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"expert_cache_gib": -1.0}, "expert_cache_gib is -1.0, but must be 0 or above"),
        ({"expert_cache_gib": 1.0, "deterministic": True}, "which experts come together depends on company"),
        ({"expert_cache_gib": 1.0}, "expert_cache_gib does nothing: all weights live in RAM"),
    ],
)
def test_what_cannot_be_is_refused(folder_of, asked, words):
    with pytest.raises(ValueError, match=words):
        answers(folder_of("mixtral"), **asked)


def test_a_dense_model_has_none(tiny_folder, tmp_path):
    settings = {"nvme_path": (tmp_path,), "max_sequences": 2, "kv_gib": 0.0004, "pass_tokens": 32, "chunk_tokens": 16}
    with pytest.raises(ValueError, match="no experts that can come alone"):
        answers(tiny_folder[0], **{**settings, "kv_gib": 0.0002}, ram_gib=0.0006, expert_cache_gib=0.001)
