"""`outcore generate --image` and `outcore chat --image`: transformers' own greedy answers; refusals in words."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from outcore.cli import main
from outcore.common.errors import AnswerFailed
from outcore.data.pictures import PictureEncoder, conversation_of, load_processor
from outcore.infer import Request
from outcore.infer.passes.seeing import GenerateCall
from tests import tiny_vision
from tests.tiny_vision import picture

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = ("--temperature", "0", "--max_tokens", "8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    tiny_vision.save(folder / "model")
    (folder / "red.png").write_bytes(picture())
    (folder / "blue.png").write_bytes(picture("blue"))
    return folder


def plain(made: Path, *turns: str, pictures: tuple[str, ...]) -> str:
    """The answer of the plain model to the last of these turns."""
    model: Any = AutoModelForImageTextToText.from_pretrained(made / "model")
    processor = load_processor(str(made / "model"))
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    talk = conversation_of(messages, [str(made / name) for name in pictures], made)
    encoder = PictureEncoder(processor, [model.config.image_token_id])
    asked = encoder.inputs_of(encoder.written(talk), talk)
    with torch.no_grad():
        told = model.generate(**asked, do_sample=False, max_new_tokens=8)
    return processor.tokenizer.decode(told[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def test_one_question_about_two_pictures_is_answered_as_by_transformers(made, capsys):
    images = [word for name in ("red", "blue") for word in ("--image", str(made / f"{name}.png"))]
    assert main(["generate", str(made / "model"), "--prompt", "hello", *images, *GREEDY]) == 0
    out = "".join(capsys.readouterr())
    assert plain(made, "hello", pictures=("red.png", "blue.png")).strip() in out and "2 pictures" in out


def test_a_conversation_takes_more_pictures_and_goes_on_after_a_bad_one(made, capsys, monkeypatch):
    lines = f"hello\n/image {made / 'gone.png'}\nand this\n/image '{made / 'blue.png'}'\ntest\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", str(made / "model"), "--image", str(made / "red.png"), *GREEDY]) == 0
    out = "".join(capsys.readouterr())
    first = plain(made, "<image>hello", pictures=("red.png",))
    second = plain(made, "<image>hello", first, "<image>test", pictures=("red.png", "blue.png"))
    assert first.strip() in out and second.strip() in out and "gone.png (this message is left out)" in out


def test_a_picture_that_the_next_turn_shows_again_is_encoded_once(made, capsys, monkeypatch):
    looks, look = list[int](), SiglipVisionModel.forward

    def noted(self: Any, pixel_values: torch.Tensor, **how: Any) -> Any:
        looks.append(len(pixel_values))
        return look(self, pixel_values, **how)

    first = plain(made, "<image>hello", pictures=("red.png",))
    second = plain(made, "<image>hello", first, "test", pictures=("red.png",))
    monkeypatch.setattr(SiglipVisionModel, "forward", noted)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello\ntest\n/image {made / 'blue.png'}\nand\n/quit\n"))
    assert main(["chat", str(made / "model"), "--image", str(made / "red.png"), *GREEDY]) == 0
    out = "".join(capsys.readouterr())
    assert first.strip() in out and second.strip() in out and looks == [1, 2]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--image", "gone.png"], "picture 1: there is no file gone.png"),
        (["--image", "https://example.org/a.png"], "not fetched from the network"),
        (["--image", "x.png", "--aim", "latency"], "do not read --aim"),
    ],
)
def test_what_cannot_be_is_refused_in_words(more, words, made, capsys):
    assert main(["generate", str(made / "model"), "--prompt", "hello", *more]) == 2
    assert words in " ".join(capsys.readouterr())


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope, "bos_token_id": 3,
        "eos_token_id": 2,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text, vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        image_token_id=500, video_token_id=501, vision_start_token_id=502, vision_end_token_id=503,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config).eval()


@pytest.mark.parametrize("ours", [False, True])
def test_a_call_that_failed_keeps_nothing(ours, monkeypatch):
    model, ids = qwen2_vl(), (5, 502, *[500] * 4, 503, 6, 501)
    kinds = torch.tensor([[{500: 1, 501: 2}.get(token, 0) for token in ids]])
    pixels = {"pixel_values": torch.rand(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    request = Request("a", ids, seen={**pixels, "mm_token_type_ids": kinds})
    kept = []

    def forward(pixels: Any, **more: Any) -> None:
        activations = pixels + 1
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("full")

    if ours:
        monkeypatch.setattr(model.model.visual, "forward", forward)
        request = Request("a", ids[:-1], seen={**pixels, "mm_token_type_ids": kinds[:, :-1]})
    gc.disable()
    try:
        call = GenerateCall(model, request, torch.device("cpu"))
        with pytest.raises(torch.OutOfMemoryError if ours else AnswerFailed) as told:
            call.logits_after(ids[-1])
        if ours:
            assert kept[0]() is None
        kept.append(weakref.ref(call))
        del call, told
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()
