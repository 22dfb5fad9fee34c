"""`import outcore`: names, signatures, and that nothing is loaded for them."""

import inspect
import subprocess
import sys

import pytest

import outcore

NAMES = {
    *("InferConfig", "LLM", "OutcoreConfig", "SamplingParams", "TrainConfig", "Trainer", "load", "plan", "serve"),
    "stream",
}
PATH, CONFIG, SAID = "'str | os.PathLike[str]'", "config: 'InferSettings | None' = None", "**settings: 'Any'"
SIGNATURES = {
    "load": f"(name: {PATH}, *, precision: 'str' = 'auto', adapter: 'str | None' = None, "
    "trust_remote_code: 'bool' = False) -> 'tuple[Any, Any]'",
    "plan": f"(model: {PATH}, *, infer: 'bool' = False, {SAID}) -> 'PlanResult'",
    "serve": f"(model: {PATH}, {CONFIG}, *, block: 'bool' = True, {SAID}) -> 'ServedModel | None'",
    "LLM": f"(model: {PATH}, {CONFIG}, {SAID}) -> 'None'",
    "Trainer": "(config: 'TrainConfig | str | os.PathLike[str]', *, dataset: 'Rows | None' = None, "
    "eval_dataset: 'Rows | None' = None) -> 'None'",
    "SamplingParams": "(**said: 'Any') -> 'None'",
}
METHODS = {
    "generate": "(self, prompts: 'Prompt | Sequence[Prompt]', sampling_params: 'Said | Sequence[Said] | None' = None, "
    "**sampling: 'Any') -> 'list[RequestOutput]'",
    "chat": "(self, messages: 'Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]]', sampling_params: "
    "'Said | Sequence[Said] | None' = None, **fields: 'Any') -> 'list[RequestOutput]'",
    "stream": "(self, prompt: 'Prompt | Sequence[Mapping[str, Any]]', sampling_params: 'Said | None' = None, **fields: "
    "'Any') -> 'Iterator[CompletionOutput]'",
    "score": "(self, prompts: 'str | Sequence[str]', completions: 'str | Sequence[str] | None' = None) -> "
    "'list[ScoreOutput]'",
    "embed": "(self, prompts: 'str | Sequence[str]') -> 'list[EmbeddingOutput]'",
    "classify": "(self, prompts: 'str | Sequence[str]') -> 'list[ClassificationOutput]'",
    "rerank": "(self, query: 'str', documents: 'str | Sequence[str]') -> 'list[RerankOutput]'",
    "get_tokenizer": "(self) -> 'Any'",
    "close": "(self) -> 'None'",
}
LAZY = """
import sys, time
began = time.perf_counter()
import outcore
took = time.perf_counter() - began
assert sorted(n for n in dir(outcore) if not n.startswith("_") and n in outcore._HOME_OF) == sorted(outcore._HOME_OF)
assert not {"torch", "transformers", "yaml", "outcore.api", "outcore.hf"} & sys.modules.keys(), "loaded at import"
assert took < 0.5, took
outcore.TrainConfig(max_steps=3)
assert callable(outcore.plan)
import outcore.plan.profile  # rooms stay modules
from outcore.plan import RunRequest
assert outcore.plan.profile.RunRequest is RunRequest
assert outcore.plan("tiny", machine="rtx4070-laptop").fits and "torch" not in sys.modules
"""


def test_the_names_are_these():
    assert set(outcore._HOME_OF) == NAMES <= set(dir(outcore))
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        outcore.LMM  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay(name):
    assert str(inspect.signature(getattr(outcore, name))) == SIGNATURES[name]


def test_signatures_of_an_llm_stay():
    own = {name: str(inspect.signature(getattr(outcore.LLM, name))) for name in METHODS}
    assert own == METHODS
    public = {name for name, found in vars(outcore.LLM).items() if not name.startswith("_")}
    assert public == {*METHODS, "max_model_len", "lines"}


def test_importing_it_loads_nothing():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["stream", "OutcoreConfig"])
def test_the_boundary_opens_when_it_is_asked_for(name):
    assert outcore._HOME_OF[name] == ("hf", name)
