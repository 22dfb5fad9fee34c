"""Forms that answers must have: masks for every place of a pass, worked out while its layers run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outcore.apart import Apart, Bench
from outcore.infer.requests import Grammars, Matcher, Request, Sampling
from tests.infer.models import TinyEngine
from tests.refused import refused

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars():
    from outcore.data import train_byte_bpe

    tokenizer = train_byte_bpe(["The quick brown fox jumps over the lazy dog. " * 40], 512)
    return tokenizer, Grammars(tokenizer, frozenset({tokenizer.eos_token_id}))


def allowed(bits: torch.Tensor) -> set[int]:
    flags = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return set(flags.flatten().nonzero()[:, 0].tolist())


def test_masks_of_guesses_are_those_after_taking_them(grammars):
    tokenizer, compiler = grammars
    form = compiler.of({"type": "regex", "pattern": "(yes|no)!"})
    guesses = [*tokenizer("no!", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ahead, behind = form.matcher(), form.matcher()
    assert ahead.count_allowed([*guesses, guesses[0]]) == len(guesses)
    assert ahead.count_allowed([guesses[-2]]) == 0
    for _ in range(2):  # what was looked at ahead is not taken
        ahead.begin(guesses)
        found = [allowed(ahead.mask(place)) for place in range(len(guesses))]
    for place, token in enumerate(guesses):
        behind.begin()
        assert found[place] == allowed(behind.mask(0)) and token in found[place]
        behind.take(token)
    assert behind.is_complete and not ahead.is_complete


@pytest.mark.parametrize(
    ("text", "allows"),
    [
        ('{"a":1,"b":[]}', True),
        ('{"a": 1, "b": ["x", "y"]}', True),
        ('{\n\n    "a": 1,\n\t"b": [\n        "x"\n    ]\n}', True),
        ('{"a":  1', False),
        ("{\n\n\n", False),
        ("{\n" + 21 * " ", False),
    ],
)
def test_blanks_in_json_are_few(grammars, text, allows):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
    tokens = grammars[0](text, add_special_tokens=False)["input_ids"]
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": schema}}):
        count = grammars[1].of(form).matcher().count_allowed(tokens)
        assert (count == len(tokens)) is allows


def test_masks_are_worked_out_during_the_pass_and_guesses_change_no_text(grammars, monkeypatch):
    form = grammars[1].of({"type": "regex", "pattern": "(abc|abd){8}"})
    seen: list[int] = []

    def answers(speculates: bool) -> list[list[int]]:
        tiny = TinyEngine("llama", vocab_size=len(grammars[0]), speculates=speculates)
        run = tiny.runner.run

        def watched(works):
            for work in works:
                if work.is_last:  # begun already: asked for in here they would otherwise never come
                    seen.extend(len(work.sequence.matcher.mask(place)) for place in range(work.num_drafts + 1))
            return run(works)

        monkeypatch.setattr(tiny.runner, "run", watched)
        try:
            requests = [
                Request(f"r{i}", (5, 6, 7), Sampling(temperature=i, max_tokens=40), grammar=form) for i in range(2)
            ]
            found = list(tiny.engine.generate(requests))
            assert tiny.engine.counts.drafted > 0 if speculates else not tiny.engine.counts.drafted
            assert all(answer.finish == "stop" for answer in found)
            return [[c.token for c in a.tokens] for a in sorted(found, key=lambda a: a.request)]
        finally:
            tiny.close()

    assert answers(True) == answers(False)
    assert seen


WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}
"""What llguidance compiles, and cannot go on with behind the first brace."""


def test_a_form_that_cannot_be_followed_is_refused(grammars):
    refused(
        ValueError, "Current row has", lambda: grammars[1].of({"type": "json_schema", "json_schema": {"schema": WIDE}})
    )
    refused(ValueError, "a token", lambda: grammars[1].of({"type": "regex", "pattern": "(a{1000}){1000}"}))
    refused(ValueError, "letters", lambda: grammars[1].of({"type": "regex", "pattern": "a" * (1 << 20)}))


@pytest.mark.parametrize("speculates", [False, True])
def test_an_answer_that_cannot_go_on_in_its_form_ends_with_an_error(grammars, speculates):
    tokenizer = grammars[0]
    untried = Grammars(tokenizer, frozenset({tokenizer.eos_token_id}), ask=lambda *what, **limits: None)
    form = untried.of({"type": "json_schema", "json_schema": {"schema": WIDE}})
    tiny = TinyEngine("llama", vocab_size=len(tokenizer), speculates=speculates)
    try:
        (answer,) = tiny.engine.generate([Request("r", (5, 6, 7), Sampling(max_tokens=40), grammar=form)])
    finally:
        tiny.close()
    assert answer.finish == "error" and "Current row has" in answer.error


def test_a_form_that_comes_again_is_not_compiled_again(grammars):
    asked = []
    compiler = Grammars(
        grammars[0], frozenset({grammars[0].eos_token_id}), ask=lambda *what, **limits: asked.append(what)
    )
    first, again = (compiler.of({"type": "regex", "pattern": "(yes|no)!"}) for _ in range(2))
    assert first is again and [name for name, *_ in asked] == ["ready_for_forms", "try_form"]


def test_a_form_is_tried_for_so_many_seconds(grammars, monkeypatch):
    tokenizer, ends = grammars[0], frozenset({grammars[0].eos_token_id})
    apart = Apart(Bench(tokenizer, sorted(ends)))
    try:
        apart.call("ready_for_forms")
        monkeypatch.setattr("outcore.infer.requests.grammar.COMPILE_S", 0.0)
        form = {"type": "regex", "pattern": "(yes|no){9}!"}
        refused(ValueError, "takes more than the 0 s", lambda: Grammars(tokenizer, ends, apart.call).of(form))
    finally:
        apart.close()


def test_an_answer_whose_next_mask_cannot_be_made_has_not_ended():
    class Broken:
        error = ""

        def compute_bitmask(self):
            self.error = "too many rows\nstate: ..."
            return b"\1"  # its end may come

        def is_error(self):
            return bool(self.error)

        def get_error(self):
            return self.error

        def is_stopped(self):
            return True

    with ThreadPoolExecutor(1) as threads:
        matcher = Matcher(Broken(), threads)
        matcher.begin()
        assert allowed(matcher.mask(0)) == {0}
    assert matcher.error == "too many rows" and not matcher.is_complete


def test_an_answer_whose_next_token_takes_too_long_ends_and_others_go_on(monkeypatch):
    monkeypatch.setattr("outcore.infer.requests.grammar.MASK_WAIT_S", 0.05)
    is_over = threading.Event()

    class Slow:
        def compute_bitmask(self):
            is_over.wait(60)
            return bytes(8)

        def is_error(self):
            return False

    with ThreadPoolExecutor(1) as threads:
        matcher = Matcher(Slow(), threads)
        matcher.begin()
        assert len(allowed(matcher.mask(0))) and "took more than" in matcher.error
        matcher.take(0)  # the threads have it still
        assert not matcher.is_complete
        is_over.set()
