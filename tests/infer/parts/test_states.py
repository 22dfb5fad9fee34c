"""Recurrent and hybrid models: greedy answers equal transformers' generate, however prompts are cut and shared."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import closing

import pytest
import torch
from safetensors.torch import save

from outcore.data import train_byte_bpe
from outcore.infer.cache import SequenceStates
from outcore.infer.opening import InferSettings, open_engine
from outcore.infer.opening.check import way_of
from outcore.infer.schedule import Drafter, ScheduleLimits
from outcore.sizing.inference import InferenceLimits, InferenceNeeds, KvSize, LayerSize
from tests.flow.models import needs, tiny_loaded
from tests.infer.models import TinyEngine, greedy, greedy_by_transformers, opening, prompts_of, save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
CONV = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
FIELDS = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": MIXED,
    "lfm2": CONV,
}
STATES = ["mamba2", "qwen3_next", "lfm2", "olmo_hybrid"]
MORE_STATES = ["bamba", "granitemoehybrid", "falcon_h1", "qwen3_5_text", "kimi_linear", "bailing_hybrid", "lfm3"]
AGENTS = [
    *(
        pytest.param(name, most, marks=[needs(name), pytest.mark.more(after=1)])
        for name, most in (("qwen3_next", 2), ("mamba2", 256))
    ),
    *(
        pytest.param(name, most, marks=[needs(name), pytest.mark.slow])
        for name, most in (("lfm2", 2), ("falcon_h1", 256))
    ),
]
"""Families, and copies of states that RAM has room for."""
STEPS = ["mamba", "jamba"]
MORE_STEPS = ["falcon_mamba", "nemotron_h"]
ALONE = ("mamba", "mamba2", "falcon_mamba")
COUNT = 14


def loaded_of(family: str):
    return tiny_loaded(family, attention="eager" if family in ALONE else None, **FIELDS.get(family, {}))


def expected_of(loaded, prompts) -> list[list[int]]:
    return [greedy_by_transformers(loaded.model.eval(), prompt, COUNT) for prompt in prompts]


def guess(monkeypatch, answers: dict[int, list[int]], wrong_at: int) -> None:
    """Have drafters propose the next tokens of the answer behind the prompt of this length, one of them wrong."""

    def propose(self, tokens, most, *more):
        length = max(n for n in answers if n <= len(tokens))
        known = len(tokens) - length
        found = answers[length][known : known + min(most, 5)]
        return [(t + 1) % 100 if known + at == wrong_at else t for at, t in enumerate(found)]

    monkeypatch.setattr(Drafter, "propose", propose)


def check(family: str, way: str, monkeypatch) -> None:
    loaded = loaded_of(family)
    prompts = prompts_of()
    expected = expected_of(loaded, prompts)
    with closing(TinyEngine(family, way, loaded=loaded)) as tiny:
        assert tiny.greedy(prompts, COUNT) == expected
        assert tiny.greedy(prompts, COUNT) == expected, "beginnings are shared now"
        assert (tiny.engine.counts.cached_tokens > 0) == (way == "states")
        tiny.cache.clear_prefixes()
        if way == "states":
            for number, wrong_at in ((1, 7), (3, 0), (4, 3)):  # a guess of the middle, the first, several rounds
                with monkeypatch.context() as patch:
                    guess(patch, {len(prompts[number]): expected[number]}, wrong_at)
                    before = tiny.engine.counts.accepted
                    assert tiny.greedy([prompts[number]], COUNT) == [expected[number]]
                    assert tiny.engine.counts.accepted > before
        assert all(used == 0 for used in tiny.cache.used_pages) or tiny.cache.index


@pytest.mark.more(after=1)
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in STATES])
def test_states_beside_pages(family, monkeypatch):
    check(family, "states", monkeypatch)


@pytest.mark.more(after=1)
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in STEPS])
def test_prompts_in_one_piece(family, monkeypatch):
    check(family, "steps", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in MORE_STATES])
def test_more_states_beside_pages(family, monkeypatch):
    check(family, "states", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(name, marks=needs(name)) for name in MORE_STEPS])
def test_more_prompts_in_one_piece(family, monkeypatch):
    check(family, "steps", monkeypatch)


def test_the_way_is_found_by_trying():
    assert way_of(loaded_of("mamba2"))[0] == "states"
    way, why = way_of(loaded_of("mamba"))
    assert way == "steps" and "states: a tiny copy gives other logits" in why


def test_a_beginning_is_shared_from_the_place_where_prompts_part():
    """The first prompt leaves its states at its last page, the second where it leaves the first, the third begins
    there."""
    loaded, generator = loaded_of("mamba2"), torch.Generator().manual_seed(3)
    own = [torch.randint(2, 128, (n,), generator=generator).tolist() for n in (18, 7, 9, 5)]
    prompts = [own[0] + tail for tail in own[1:]]
    expected = expected_of(loaded, prompts)
    tiny = TinyEngine("mamba2", "states", loaded=loaded)
    assert tiny.cache.snapshots is not None
    cached = []
    for prompt, answer in zip(prompts, expected, strict=True):
        assert tiny.greedy([prompt], COUNT) == [answer]
        cached.append(tiny.engine.counts.cached_tokens)
    assert cached == [0, 0, 16], "pages of 4 tokens: 16 of the 18 are whole"
    again = own[0] + own[1] + [5, 6, 7]
    assert tiny.greedy([again], COUNT) == expected_of(loaded, [again])
    assert tiny.engine.counts.cached_tokens == 16 + 24, "where the first prompt's last page ended"
    assert len(tiny.cache.snapshots) == 4
    tiny.cache.clear_prefixes()
    assert len(tiny.cache.snapshots) == 0
    tiny.close()


def test_sequences_that_lose_their_pages_compute_their_states_again(monkeypatch):
    loaded = loaded_of("qwen3_next")
    prompts = prompts_of(6)
    expected = expected_of(loaded, prompts)
    tiny = TinyEngine("qwen3_next", "states", loaded=loaded, limits=ScheduleLimits(6, 24, 8, 8))
    spare = [ledger.take(ledger.num_free - 22) for ledger in tiny.cache.ledgers]
    assert tiny.greedy(prompts, COUNT) == expected
    assert tiny.scheduler.num_preempted > 0 and spare
    tiny.close()


def test_texts_are_scored_each_by_itself():
    loaded = loaded_of("mamba2")
    texts = prompts_of()
    tiny = TinyEngine("mamba2", "states", loaded=loaded)
    for text, scores in zip(texts, tiny.engine.score(texts), strict=True):
        with torch.no_grad():
            logprobs = loaded.model(input_ids=torch.tensor([text])).logits[0].float().log_softmax(-1)
        plain = [float(logprobs[at, token]) for at, token in enumerate(text[1:])]
        assert scores == pytest.approx(plain, abs=1e-4)
    tiny.close()


def test_states_step_back_to_what_was_remembered():
    class Layer:
        def __init__(self) -> None:
            self.recurrent_states = {0: torch.zeros(1, 3)}
            self.has_previous_state = {0: True}

    states = SequenceStates({4: Layer()}, length=7)
    assert states.size_bytes == 12
    states.remember()
    states.layers[4].recurrent_states[0].add_(1)
    states.length = 9
    assert states.step_back() == 7 == states.length
    assert not states.layers[4].recurrent_states[0].any()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    model, _ = save_tiny_model(folder, family="lfm2", layer_types=CONV["layer_types"])
    return folder, [greedy_by_transformers(model, prompt, COUNT) for prompt in prompts_of(4, vocab=280)]


@pytest.mark.more(after=1)
@pytest.mark.parametrize("settings", [{}, {"chunk_tokens": 16, "page_tokens": 4}])
def test_a_hybrid_model_opened_by_name(hybrid, settings):
    folder, expected = hybrid
    with opening(folder, **settings) as opened:
        assert opened.way == "states"
        assert any("recurrent states" in line for line in opened.placement.lines())
        for _ in range(2):
            assert greedy(opened.engine, prompts_of(4, vocab=280), COUNT, ignore_eos=True) == expected
        cached = opened.engine.counts.cached_tokens
        assert cached > 0 or not settings


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """A folder of a tiny hybrid of each family, made when it is first asked for."""
    made = {}

    def of(family: str):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            loaded = loaded_of(family)
            loaded.config.max_position_embeddings = loaded.model.config.max_position_embeddings = 4096
            loaded.model.save_pretrained(made[family])
            train_byte_bpe(["The fox. "] * 40, 512).save_pretrained(made[family])
        return made[family]

    return of


def turns():
    """Prompts of thirty turns, each a question and a tool's result behind all before; titles of their own between."""
    draws = random.Random(5)
    said = [draws.randrange(2, 100) for _ in range(700)]
    for turn in range(30):
        for _ in range(2):
            said += [draws.randrange(2, 100) for _ in range(6)]
            yield [*said]
        if turn % 6 == 5:
            yield [draws.randrange(2, 100) for _ in range(12)]


def session(folder, prompts, **settings):
    """Answers one after another, tokens of prompts, of which from the cache, and pages brought from the drive."""
    with opening(folder, page_tokens=4, max_sequences=2, **{"context": 512, **settings}) as opened:
        assert opened.way == "states"
        found = [greedy(opened.engine, [prompt], 3, ignore_eos=True)[0] for prompt in prompts]
        counts = opened.engine.counts
        return found, counts.prompt_tokens, counts.cached_tokens, opened.engine.scheduler.cache.counts.read_pages


@pytest.mark.parametrize(("family", "snapshots"), AGENTS)
def test_thirty_turns_with_a_restart_come_from_the_cache(agents, family, snapshots, tmp_path, monkeypatch):
    """Also where RAM has room for two copies of states only: the others come from the drive."""
    monkeypatch.setattr("outcore.sizing.inference.needs.MOST_SNAPSHOTS", snapshots)
    prompts, middle = list(turns()), 32
    expected = session(agents(family), prompts[::9], context=2048, share_prefixes=False)[0]
    kept = {"context": 2048, "prefix_path": tmp_path, "prefix_gib": 0.05}
    first = session(agents(family), prompts[:middle], **kept)
    second = session(agents(family), prompts[middle:], **kept)
    assert (first[0] + second[0])[::9] == expected
    assert second[3] > 0, "the first prompt after the restart begins on the drive"
    assert second[2] / second[1] >= 0.98, "what was read before the restart is not read again"
    assert (first[2] + second[2]) / (first[1] + second[1]) >= 0.97


def change(folder, how: str, *, of_states: bool) -> None:
    """Damage every record but the first of a kind, behind its head: a bit, or the second half never written."""
    (records,) = (
        path
        for path in folder.rglob("records.bin")
        if ("states" in json.loads((path.parent / "model.json").read_text())) == of_states
    )
    listed = json.loads((records.parent / "pages.json").read_text())
    data, size = bytearray(records.read_bytes()), records.stat().st_size // listed["most"]
    for _, _, slot in listed["pages"][0 if of_states else 1 :]:
        if how == "flip":
            data[slot * size + 4096 + 9] ^= 1
        else:
            data[slot * size + 4608 : (slot + 1) * size] = bytes(size - 4608)
    records.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "tear"])
@pytest.mark.parametrize("of_states", [True, False])
def test_states_that_are_damaged_or_stand_behind_a_damaged_page_are_computed_again(
    hybrid, tmp_path, caplog, how, of_states
):
    prompt = [draw % 250 + 2 for draw in range(0, 120, 3)]
    kept = {"prefix_path": tmp_path, "prefix_gib": 0.05}
    expected, _, _, _ = session(hybrid[0], [prompt, prompt], **kept)
    change(tmp_path, how, of_states=of_states)
    found, _, cached, _ = session(hybrid[0], [prompt, prompt], **kept)
    assert found == expected and "computed again" in caplog.text
    assert cached == 36, "the second asking begins with what the first one left"
    assert session(hybrid[0], [prompt], **kept)[2] == 36, "and so does a third, after a restart"


@pytest.mark.parametrize(
    "wrong",
    [b"nothing", save({"x": torch.zeros(2)}), save({"9.conv_states.0": torch.zeros(2)})],
    ids=["no safetensors", "another naming", "a layer that is not there"],
)
def test_states_whose_bytes_are_right_and_mean_something_else_are_computed_again(
    hybrid, tmp_path, caplog, monkeypatch, wrong
):
    """What raised while a request began ended no answer, and was raised again by every pass."""
    prompt = [draw % 250 + 2 for draw in range(0, 120, 3)]
    kept = {"prefix_path": tmp_path, "prefix_gib": 0.05}
    with monkeypatch.context() as patch:
        patch.setattr(SequenceStates, "to_bytes", lambda self: wrong)
        expected, _, _, _ = session(hybrid[0], [prompt, prompt], **kept)
    found, _, cached, _ = session(hybrid[0], [prompt, prompt], **kept)
    assert found == expected and "computed again" in caplog.text and cached == 36
    assert session(hybrid[0], [prompt], **kept)[2] == 36, "what was computed again is kept"


def test_a_kill_leaves_states_that_are_right_or_none(hybrid, tmp_path, monkeypatch):
    """Lists are written at every record, and the folder is copied between any two prompts."""
    monkeypatch.setattr("outcore.infer.cache.kept.COMMIT_EVERY_S", 0)
    monkeypatch.setattr("outcore.sizing.inference.needs.MOST_SNAPSHOTS", 1)
    prompts = [
        [(7 * draw + 3 * (draw > 20) * first) % 250 + 2 for draw in range(30 + first)] for first in range(0, 12, 2)
    ]
    expected = session(hybrid[0], prompts, share_prefixes=False)[0]
    with opening(hybrid[0], context=512, page_tokens=4, prefix_path=tmp_path / "live", prefix_gib=0.01) as opened:
        for number, prompt in enumerate(prompts):
            assert greedy(opened.engine, [prompt], 3, ignore_eos=True) == [expected[number]]
            shutil.copytree(tmp_path / "live", tmp_path / str(number))
    cached = [
        session(hybrid[0], prompts, prefix_path=tmp_path / str(number), prefix_gib=0.01)
        for number in range(len(prompts))
    ]
    assert all(found[0] == expected for found in cached)
    assert cached[-1][3] > cached[0][3], "the last copy has more than the first"


def test_what_a_hybrid_model_cannot_is_said(hybrid, tmp_path):
    with pytest.raises(ValueError, match="are not shared, so no prompt begins"):
        open_engine(str(hybrid[0]), InferSettings(context=128, ram_gib=1, prefix_path=tmp_path, deterministic=True))
    with pytest.raises(ValueError, match="cannot step back"):
        open_engine(str(hybrid[0]), InferSettings(context=128, ram_gib=1, draft_model=str(hybrid[0])))


def test_processes_that_share_ram_share_the_room_for_copies():
    needs, limits = InferenceNeeds((), KvSize(()), LayerSize(64, 128, ()), 64, 2), InferenceLimits(None, 100_000)
    for processes, copies in ((1, 50), (2, 25), (4, 12)):
        found, left = needs.with_snapshots(100, limits, processes)
        assert found.num_snapshots == copies and left.ram_bytes == 100_000 - processes * copies * 100
