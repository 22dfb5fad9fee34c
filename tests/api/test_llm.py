"""`outcore.LLM` answers as the commands do, by vLLM's names, and outlives Ctrl-C."""

import json
import logging
import os
import signal
import threading
import time

import pytest
import torch

import outcore
from outcore import cli
from tests.api.conftest import SMALL
from tests.infer.models import greedy_by_transformers

pytestmark = pytest.mark.usefixtures("one_thread")
FLAGS = [f"--{name}={value}" for name, value in SMALL.items()]
TALK = [{"role": "user", "content": "Hi"}]


def test_generate_gives_the_tokens_of_the_command(tiny, llm, tmp_path, capsys):
    folder, model, tokenizer = tiny
    (output,) = llm.generate("The quick", temperature=0, max_tokens=6)
    expected = greedy_by_transformers(model, tokenizer("The quick")["input_ids"], 6)
    answer = output.outputs[0]
    assert list(answer.token_ids) == expected and answer.finish_reason == "length"
    assert output.prompt == "The quick" and list(output.prompt_token_ids) == tokenizer("The quick")["input_ids"]
    common = [str(folder), *FLAGS, "--temperature", "0", "--max_tokens", "6"]
    assert cli.main(["generate", *common, "--prompt", "The quick"]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == answer.text
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"The {word}"}) + "\n" for word in ("quick", "lazy", "dog")))
    assert cli.main(["generate", *common, "--input", str(source), "--output", str(target)]) == 0
    texts = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    found = llm.generate(["The quick", "The lazy", {"prompt": "The dog"}], {"temperature": 0}, max_tokens=6)
    assert [output.outputs[0].text for output in found] == texts


def test_prompts_and_sampling_come_in_vllms_shapes(tiny, llm):
    ids = tiny[2]("The quick")["input_ids"]
    params = outcore.SamplingParams(temperature=0, max_tokens=4)
    by_text, by_ids, by_mapping = (
        llm.generate(prompt, params)[0] for prompt in ("The quick", ids, {"prompt_token_ids": ids})
    )
    assert by_text.outputs == by_ids.outputs == by_mapping.outputs and by_ids.prompt is None
    short, long = llm.generate(["The quick"] * 2, [{"max_tokens": 1}, {"max_tokens": 5}], temperature=0)
    assert [len(output.outputs[0].token_ids) for output in (short, long)] == [1, 5]
    (drawn,) = llm.generate("The", n=3, seed=7, temperature=1.5, max_tokens=4, logprobs=2)
    assert [answer.index for answer in drawn.outputs] == [0, 1, 2]
    first = drawn.outputs[0]
    assert first.logprobs and all(token in of for token, of in zip(first.token_ids, first.logprobs, strict=True))
    assert first.cumulative_logprob == pytest.approx(sum(of[t] for t, of in zip(first.token_ids, first.logprobs)))
    assert llm.generate("The", n=3, seed=7, temperature=1.5, max_tokens=4)[0].outputs[1].text == drawn.outputs[1].text
    assert llm.generate([]) == [] and by_text.outputs[0].logprobs is None
    assert llm.max_model_len == 256 and llm.get_tokenizer().eos_token_id is not None and any(llm.lines)


def test_a_chat_is_answered_whole_and_piece_by_piece(llm):
    several = llm.chat([TALK, TALK], temperature=0, max_tokens=6)
    (output,) = llm.chat(TALK, temperature=0, max_tokens=6)
    assert [one.outputs for one in several] == [output.outputs] * 2
    answer = output.outputs[0]
    assert answer.message == {"role": "assistant", "content": answer.text} and output.prompt is None
    pieces = list(llm.stream(TALK, temperature=0, max_tokens=6))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert [piece.finish_reason for piece in pieces][-1] == answer.finish_reason == "length"
    assert sum((piece.token_ids for piece in pieces), ()) == answer.token_ids
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    assert llm.chat(TALK, response_format=form, max_tokens=20)[0].outputs[0].text in ('"yes"', '"no"')


def test_a_stream_that_is_left_is_cancelled(llm):
    before = llm._engine.counts.finished.get("cancelled", 0)
    for piece in llm.stream("The", max_tokens=200, ignore_eos=True):
        assert piece.token_ids and piece.finish_reason is None
        break
    llm.generate("The", max_tokens=1)  # a pass later
    assert llm._engine.counts.finished["cancelled"] == before + 1 and llm._engine.num_running == 0


def test_scores_are_the_commands(tiny, llm, tmp_path, capsys):
    texts = ["The quick brown fox", "a lazy dog jumps"]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"text": texts[0]}, {"prompt": texts[0], "completion": f" {texts[1]}"}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [*FLAGS, "--input", str(source), "--output", str(target), "--token_logprobs"]
    assert cli.main(["score", str(tiny[0]), *flags]) == 0
    expected = [json.loads(line) for line in target.read_text().splitlines()]
    found = llm.score(texts[0]) + llm.score([texts[0]], [f" {texts[1]}"])
    for mine, theirs in zip(found, expected, strict=True):
        assert list(mine.token_logprobs) == pytest.approx(theirs["token_logprobs"], abs=1e-5)
        assert mine.logprob == pytest.approx(theirs["logprob"], abs=1e-4)
        assert mine.perplexity == pytest.approx(theirs["perplexity"], rel=1e-5)
    assert found[1].text == f"{texts[0]} {texts[1]}"


def test_embeddings_are_means_of_length_one(tiny, llm):
    _, model, tokenizer = tiny
    texts = ["The quick brown fox", "dog"]
    for text, output in zip(texts, llm.embed(texts), strict=True):
        with torch.no_grad():
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            hidden = model.base_model(input_ids=ids).last_hidden_state[0].mean(0)
        assert output.prompt == text
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), hidden / hidden.norm(), atol=1e-4, rtol=1e-4)


REFUSED = [
    (lambda llm: llm.generate("x", temperatur=0), "unknown setting 'temperatur'. Did you mean 'temperature'"),
    (lambda llm: llm.generate("x", temperature=-1), "temperature is -1"),
    (lambda llm: llm.generate(["x", "y"], [{}]), "2 prompts and 1 sampling_params"),
    (lambda llm: llm.generate("x", max_tokens=1000), "together more than the 256"),
    (lambda llm: llm.generate([[10**6]]), "outside the model's vocabulary"),
    (lambda llm: llm.generate({"prompt": None}), "either prompt or messages"),
    (lambda llm: llm.chat([{"role": "user"}]), "content"),
    (lambda llm: llm.score(["x"], ["y", "z"]), "1 prompts and 2 completions"),
    (lambda llm: llm.embed("x " * 600), "more than the"),
    (lambda llm: outcore.SamplingParams(top_p=2), "top_p is 2"),
]


@pytest.mark.parametrize(("ask", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_is_a_sentence(llm, ask, words):
    with pytest.raises(ValueError, match=words):
        ask(llm)
    assert llm.generate("The", max_tokens=1)


def test_settings_of_a_model_are_refused_as_the_commands_refuse_them(tiny, tmp_path):
    for said, words in (
        ({"contxt": 4}, "unknown setting 'contxt'. Did you mean 'context'"),
        ({"context": 64, "max_model_len": 64}, "max_model_len means context"),
        ({"quantization": "int3"}, "quantize is 'int3'"), ({"dtype": "int8"}, "precision is 'int8'"),
        ({"vram_gib": 1}, "does nothing on a CPU"), ({"ram_gib": 0.0001}, "RAM"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            outcore.LLM(str(tiny[0]), device="cpu", **said)
    with pytest.raises((ValueError, RuntimeError), match="no-such-model"):
        outcore.LLM(str(tmp_path / "no-such-model"))


def test_two_models_at_once_and_vllms_names(tiny, llm, caplog, tmp_path):
    config = outcore.InferConfig(page_tokens=8, ram_gib=0.5)
    with caplog.at_level(logging.INFO, "outcore"):
        second = outcore.LLM(
            tiny[0],
            config,
            max_model_len=64,
            dtype=torch.float32,
            max_num_seqs=2,
            aim="latency",
            nvme_offload_path=tmp_path,
        )
    assert any("weights:" in line for line in caplog.messages)
    with second:
        assert second.config.nvme_path == (tmp_path,)
        assert (second.config.context, second.config.precision, second.config.preset) == (64, "fp32", "latency")
        mine, theirs = (one.generate("The quick", temperature=0, max_tokens=5) for one in (second, llm))
        assert mine[0].outputs == theirs[0].outputs
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        second.generate("The")
    second.close()


def test_threads_share_a_model(llm):
    alone = [llm.generate(f"The {n}", temperature=0, max_tokens=8)[0].outputs[0].text for n in range(6)]
    found: dict[int, str] = {}

    def ask(n: int) -> None:
        found[n] = llm.generate(f"The {n}", temperature=0, max_tokens=8)[0].outputs[0].text

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[n] for n in range(6)] == alone


def test_ctrl_c_ends_the_call_and_not_the_model(llm):
    expected = llm.generate("The quick", temperature=0, max_tokens=5)
    began = time.monotonic()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while time.monotonic() < began + 60:  # as many calls as it takes
            llm.generate(["The"] * 4, ignore_eos=True, max_tokens=200)
    timer.join()
    assert llm.generate("The quick", temperature=0, max_tokens=5) == expected
    assert llm._engine.num_running == llm._engine.num_waiting == 0


def test_a_failed_pass_is_an_error_of_the_call(llm, monkeypatch):
    def fails(works):
        raise RuntimeError("the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.runner, "run", fails)
        with pytest.raises(RuntimeError, match="the drive is gone"):
            llm.generate(["The", "quick"], max_tokens=4)
    assert llm.generate("The", max_tokens=1)


def test_closing_ends_calls_of_other_threads(tiny):
    model = outcore.LLM(tiny[0], **SMALL)
    told: list[BaseException] = []

    def ask() -> None:
        try:
            while True:
                model.generate(["The"] * 4, ignore_eos=True, max_tokens=200)
        except RuntimeError as error:
            told.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not model._engine.num_running:
        time.sleep(0.01)
    model.close()
    thread.join(60)
    assert not thread.is_alive() and "closed" in str(told[0])
