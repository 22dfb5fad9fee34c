"""lm-evaluation-harness and litellm as they are, against a running server: scores equal those of the model itself."""

import json

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
TASKS = {
    "choices": """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "perplexity": """
task: perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "written": """
task: written
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, temperature: 0, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task manager that knows the tasks above, over documents of its own."""
    pytest.importorskip("tenacity")  # of lm-eval[api]
    harness = pytest.importorskip("lm_eval.tasks")
    folder = tmp_path_factory.mktemp("tasks")
    words = ["quick", "brown", "lazy", "over", "jumps", "dog"]
    lines = [
        {
            "question": f"The {word} fox {'jumps ' * (number % 3)}and the",
            "choices": [f" {other}" for other in words[:4]],
            "answer": number % 4,
            "text": f"The {word} brown fox jumps over the lazy dog. " * (1 + 3 * number),
        }
        for number, word in enumerate(words)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "data.jsonl")))
    return harness.TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(tasks, names, model, **more):
    from lm_eval import simple_evaluate

    found = simple_evaluate(model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, **more)
    return {
        name: {key: value for key, value in scores.items() if isinstance(value, float) and "stderr" not in key}
        for name, scores in found["results"].items()
    }, found["samples"]


@pytest.fixture(scope="module")
def itself(tasks, tiny_folder, monkeypatch_module):
    """What the harness finds of the model in this process."""
    from lm_eval.models.huggingface import HFLM

    _folder, model, tokenizer = tiny_folder
    plain = HFLM(pretrained=model, tokenizer=tokenizer, max_length=256, batch_size=1)
    return evaluated(tasks, list(TASKS), plain)


@pytest.fixture(scope="module")
def monkeypatch_module(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        patch.setenv("OPENAI_API_KEY", "unused")
        yield patch


@pytest.mark.slow
@pytest.mark.parametrize("tokenized", [True, False])
def test_local_completions(server, tiny_folder, tasks, itself, tokenized):
    args = {
        "base_url": f"{server.url}/v1/completions", "model": "tiny", "tokenizer": str(tiny_folder[0]),
        "tokenized_requests": tokenized, "max_length": 256, "num_concurrent": 3, "batch_size": 2,
    }  # fmt: skip
    found, samples = evaluated(tasks, list(TASKS), "local-completions", model_args=args)
    expected, theirs = itself
    for name in TASKS:
        assert found[name] == pytest.approx(expected[name], rel=2e-4), name
    for mine, its in zip(samples["choices"], theirs["choices"], strict=True):
        for (a, _), (b, _) in zip(mine["filtered_resps"], its["filtered_resps"], strict=True):
            assert a == pytest.approx(b, abs=2e-3)


@pytest.mark.slow
def test_local_chat_completions(server, tiny_folder, tasks, monkeypatch_module):
    from lm_eval.models.huggingface import HFLM

    folder, model, tokenizer = tiny_folder
    args = {
        "base_url": f"{server.url}/v1/chat/completions", "model": "tiny", "tokenizer": str(folder), "num_concurrent": 2,
    }  # fmt: skip
    more = {"apply_chat_template": True}
    found, samples = evaluated(tasks, ["written"], "local-chat-completions", model_args=args, **more)
    plain = HFLM(pretrained=model, tokenizer=tokenizer, max_length=256, batch_size=1)
    expected, theirs = evaluated(tasks, ["written"], plain, **more)
    assert found == expected
    pairs = [(a["resps"][0][0], b["resps"][0][0]) for a, b in zip(samples["written"], theirs["written"], strict=True)]
    # A turn ends at <|im_end|> here; `generate` without a generation config goes on behind it.
    assert all(its.startswith(mine.rstrip("\ufffd")) for mine, its in pairs), pairs
    assert sum(mine == its for mine, its in pairs) >= 3


@pytest.mark.slow
def test_litellm(server, tiny_folder):
    litellm = pytest.importorskip("litellm")
    common = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "unused"}
    messages = [{"role": "user", "content": "Hello"}]
    whole = litellm.completion(**common, messages=messages, temperature=0, max_tokens=12, seed=3)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 12
    stream = litellm.completion(**common, messages=messages, temperature=0, max_tokens=12, seed=3, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    found = litellm.text_completion(**{**common, "model": "text-completion-openai/tiny"}, prompt="The", max_tokens=3)
    assert found.choices[0].text is not None
    vectors = litellm.embedding(**common, input=["one", "two"], encoding_format="float")
    assert len(vectors.data) == 2
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**common, messages=messages, temperature=-1)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**common, "model": "openai/nobody"}, messages=messages)
