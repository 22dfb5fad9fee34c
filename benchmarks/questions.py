"""A small tower trained from scratch on easy-VQA: 4,000 pictures of a shape, 38,575 questions, 13 answers.

    pip install easy-vqa
    python benchmarks/questions.py FOLDER --result easy_vqa.json

Makes a model (SigLIP's tower, a projector, and Llama's layers, or with `--text FOLDER` a language model that is
there), trains it by `outcore train --train_vision full`, and asks the export the package's held-out questions. An
answer is right when each of its tokens is the likeliest. Made for one GPU in ten minutes; a CPU shows by
`--rows 640 --steps 20` that it starts."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from outcore.data import DataSettings
from outcore.data.pictures import picture_rows
from outcore.hf import encoder_of, load_image_text

SIDE, PATCH, WIDTH = 64, 8, 256
PLACE = "<picture>"
TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'image' %}" + PLACE + "{% else %}"
    "{{ p['text'] }} {% endif %}{% endfor %}{% endfor %}{% if not add_generation_prompt %}<end>{% endif %}"
)


def rows(folder: Path, part: str, most: int | None) -> Path:
    """The questions of a part as rows with their pictures."""
    import easy_vqa  # pyright: ignore[reportMissingImports]

    questions, answers, numbers = getattr(easy_vqa, f"get_{part}_questions")()
    paths, file = getattr(easy_vqa, f"get_{part}_image_paths")(), folder / f"{part}.jsonl"
    told = list(zip(questions, answers, numbers, strict=True))[:most]
    lines = [json.dumps({"images": [paths[n]], "prompt": f"{q} ", "completion": a}) for q, a, n in told]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def words() -> Any:
    """A tokenizer of the questions' words."""
    import easy_vqa  # pyright: ignore[reportMissingImports]

    questions, answers, _ = easy_vqa.get_train_questions()
    cut = pre_tokenizers.Whitespace()
    known = {word for text in {*questions, *answers} for word, _ in cut.pre_tokenize_str(text)}
    vocab = {word: number for number, word in enumerate(["<unknown>", "<pad>", "<end>", PLACE, *sorted(known)])}
    made = Tokenizer(models.WordLevel(vocab, "<unknown>"))
    made.pre_tokenizer = cut
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")
    found.add_special_tokens({"additional_special_tokens": [PLACE]})
    return found


def make(folder: Path, text: str | None) -> Path:
    """The model, untrained but for the text model that was named, with its processor."""
    tokenizer = words() if text is None else transformers.AutoTokenizer.from_pretrained(text)
    if text is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": [PLACE]})
    size = {"height": SIDE, "width": SIDE}
    processor = transformers.LlavaProcessor(
        transformers.SiglipImageProcessor(size=size), tokenizer, patch_size=PATCH,
        vision_feature_select_strategy="full", chat_template=TEMPLATE.replace("<end>", tokenizer.eos_token),
        image_token=PLACE, num_additional_image_tokens=0,
    )  # fmt: skip
    layers: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_attention_heads": 4,
    }
    own = transformers.LlamaConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512, **layers
    )
    config = transformers.LlavaConfig(
        text_config=own if text is None else transformers.AutoConfig.from_pretrained(text),
        vision_config={"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH, **layers}
        | {"vision_use_head": False},
        vision_feature_select_strategy="full", vision_feature_layer=-1,
        image_token_index=tokenizer.convert_tokens_to_ids(PLACE),
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlavaForConditionalGeneration(config)
    if text is not None:
        model.resize_token_embeddings(len(tokenizer))
        there: Any = transformers.AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
        there.resize_token_embeddings(len(tokenizer))
        model.model.language_model.load_state_dict(there.model.state_dict())
        model.lm_head.load_state_dict(there.lm_head.state_dict())
    place = folder / "model"
    model.save_pretrained(place)
    processor.save_pretrained(place)
    return place


@torch.no_grad()
def right(model: str, file: Path) -> float:
    """Share of the rows of which each token of the answer is the likeliest."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    opened, read = load_image_text(model), picture_rows(DataSettings(), str(file), print)
    encoder, found = encoder_of(model, opened), 0
    opened.to(device)
    for at in range(0, len(read), 128):
        some = read[at : at + 128]
        batch = encoder.batch([row.conversation() for row in some], [()] * len(some), [row.where for row in some])
        labels = batch.pop("labels")[:, 1:]
        told = opened(**{name: value.to(device) for name, value in batch.items()}).logits[:, :-1].argmax(-1).cpu()
        found += int(((told == labels) | (labels < 0)).all(-1).sum())
    return found / len(read)


def main() -> None:
    """Make, train, ask; prints and writes the shares of right answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", help="folder of a language model (default: a small one from scratch)")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, help="questions to train on, and to ask (default: all)")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    model, trained = make(args.folder, args.text), rows(args.folder, "train", args.rows)
    asked, began_s = rows(args.folder, "test", args.rows), time.perf_counter()
    places = [word for name in ("checkpoint", "log", "export") for word in (f"--{name}_dir", str(args.folder / name))]
    batch = ["--per_device_train_batch_size", "64", "--gradient_accumulation_steps", "1", "--learning_rate", "5e-4"]
    told = ["--train_vision", "full", "--max_steps", str(args.steps), "--save_strategy", "no", "--run_name", "easy-vqa"]
    command = [sys.executable, "-m", "outcore", "train", str(model), "--dataset", str(trained), *told, *batch, *places]
    subprocess.run(command, check=True)
    trained_s = time.perf_counter() - began_s
    share = right(str(args.folder / "export" / "easy-vqa"), asked)
    found = {"right_of_held_out": share, "steps": args.steps, "train_s": trained_s, "text": args.text or "scratch"}
    print(json.dumps(found))
    if args.result:
        args.result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
