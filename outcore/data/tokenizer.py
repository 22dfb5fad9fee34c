"""Tokenizers: loaded through transformers with errors in words, or a byte-level BPE trained once on the data itself.

The trained one splits text like GPT-2 (bytes, so nothing is unknown), has ChatML tokens, and is kept in the cache
folder under a key of the texts' identity: about 5 s for the built-in text on two cores, then never again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from outcore.common import publish_folder
from outcore.common.files import check_utf8
from outcore.common.hub import ask_hub_once, near_models
from outcore.common.listing import CHECKSUMS, DamagedListing, damaged_weights, write_checksums
from outcore.common.output import say as tell
from outcore.data.basis import DataError, DataSettings, shorten
from outcore.data.cache import build_lock, cache_folder, digest_of, explained
from outcore.data.chat import default_template
from outcore.data.rows import ChatExample, TextExample, shaped_records
from outcore.data.sources import (
    Record,
    RowError,
    Source,
    is_sound,
    is_windows_spelling,
    looks_like_hub_id,
    missing_file_error,
    open_source,
    translate,
)

END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
DEFAULT_VOCAB_SIZE = 8192
MIN_VOCAB_SIZE = 512
TRAIN_CHARS = 6_000_000
"""Characters that the BPE is trained on: enough for 8,192 merges, and 5 s instead of 15 for the built-in text."""
TOKENIZER_VERSION = 1


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a local folder or a hub id, with a pad token (EOS, if it has none of its own).

    Raises DataError: no such folder, no tokenizer files in it, hub out of reach, code of its own that is not trusted.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_utf8(name_or_path, "tokenizer")
    path = translate(name_or_path)
    is_local = path.exists()
    if not is_local and (is_windows_spelling(name_or_path) or not looks_like_hub_id(name_or_path)):
        raise missing_file_error(name_or_path, path)
    if is_local and path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise DataError(
            f"folder {path} has no tokenizer in it (none of {', '.join(_TOKENIZER_FILES)}). Copy the files of the "
            "model's tokenizer there, or name another tokenizer"
        )
    if not is_local:
        ask_hub_once(tell)
    try:
        if is_local and path.suffix.lower() == ".gguf":  # from_pretrained would take a tokenizer.json beside it
            tokenizer = PreTrainedTokenizerFast(name_or_path=str(path.parent), gguf_file=path.name)
        else:
            where = str(path) if is_local else name_or_path
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    except Exception as error:
        what = shorten(str(error), 240)
        if "trust_remote_code" in str(error):
            raise DataError(
                f"the tokenizer of {name_or_path!r} runs code of its own. If you trust it, allow it: "
                f"--trust_remote_code true"
            ) from error
        if is_local:
            raise DataError(f"the tokenizer in {path} cannot be loaded: {type(error).__name__}: {what}") from error
        raise DataError(
            f"the tokenizer of {name_or_path!r} cannot be loaded from the hub: {type(error).__name__}: {what}."
            f"{near_models(name_or_path)} Check the name and the network; a folder with the tokenizer's files works "
            "without a network"
        ) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt",
)  # fmt: skip


def train_byte_bpe(texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE, *, max_chars: int = TRAIN_CHARS) -> Any:
    """A PreTrainedTokenizerFast of exactly `vocab_size` tokens at most, trained on the first `max_chars` of `texts`.

    EOS and BOS are <|endoftext|> (never added by itself), PAD is <|pad|>, with ChatML tokens and template.
    Deterministic."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if not MIN_VOCAB_SIZE <= vocab_size <= 2**20:
        raise DataError(f"vocab_size must be from {MIN_VOCAB_SIZE} to {2**20}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_TOKEN, PAD_TOKEN, *CHAT_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_at_most(texts, max_chars), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_TOKEN,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=list(CHAT_TOKENS),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = default_template(fast)
    return fast


def _at_most(texts: Iterable[str], max_chars: int) -> Iterator[str]:
    left = max_chars
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


def load_or_train_tokenizer(
    settings: DataSettings,
    name_or_path: str | None = None,
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    trust_remote_code: bool = False,
    say: Callable[[str], None] | None = None,
) -> Any:
    """`load_tokenizer(name_or_path)`, or without a name a BPE trained on `settings.dataset`, once, and cached.

    Raises DataError and CacheError as its parts do. Safe under several processes: one trains, the others wait and load.
    """
    if name_or_path is not None:
        return load_tokenizer(name_or_path, trust_remote_code)
    say = say or (lambda _: None)
    source = open_source(settings)
    key = digest_of(
        [TOKENIZER_VERSION, source.identity(), vocab_size, TRAIN_CHARS, settings.format, settings.text_column]
    )
    path = cache_folder(settings) / f"tokenizer-{key}"
    if (tokenizer := _load_trained(path, say)) is not None:
        return tokenizer
    with build_lock(path.with_name(f"{path.name}.lock"), settings.lock_timeout_s, say, "the tokenizer"):
        if (tokenizer := _load_trained(path, lambda words: None)) is not None:
            return tokenizer
        texts = _texts_of(source, settings)
        first = list(islice(texts, 1))  # a column that is not there is told before anything is trained
        say(f"training a byte-level BPE tokenizer of {vocab_size} tokens on {source.name}")
        _save(train_byte_bpe(chain(first, texts), vocab_size), path)
    tokenizer = _load_trained(path, say)
    if tokenizer is None:
        raise DataError(f"the tokenizer just written to {path} cannot be read back: is the drive healthy?")
    return tokenizer


def _texts_of(source: Source, settings: DataSettings) -> Iterator[str]:
    """Every n-th text, so that the sample is spread over the data (files come in alphabetical order)."""
    number = -1
    for record, shape in shaped_records(source, settings):
        if not isinstance(record, Record):
            continue
        number += 1
        if source.name.startswith("embedded") and number % 3 == 2:  # a third left out stays within TRAIN_CHARS
            continue
        try:
            example = shape.example(record.row)
        except RowError:
            continue  # reported, or counted, when the data is tokenised
        if isinstance(example, ChatExample):
            text = "\n".join(message["content"] for message in example.messages)
        elif isinstance(example, TextExample):
            text = example.text if example.prompt is None else f"{example.prompt} {example.text}"
        else:
            raise DataError(f"{source.name} holds tokens already: name the tokenizer that they were made with")
        if is_sound(text):
            yield text


def _save(tokenizer: Any, path: Path) -> None:
    aside = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with explained(path.parent):
        for old in (path, *path.parent.glob(f"{path.name}.partial-*")):
            if old.exists():
                shutil.rmtree(old)
        tokenizer.save_pretrained(str(aside))
        write_checksums(aside, {})
        publish_folder(aside, path)


def _load_trained(path: Path, say: Callable[[str], None]) -> Any | None:
    """The cached tokenizer; None when it is not there, or damaged, which is said."""
    if not path.is_dir():
        return None
    try:
        problems = [p for group in damaged_weights(path) for p in group]
        if not (path / CHECKSUMS).is_file():
            problems = [f"{path / CHECKSUMS} is missing"]
    except DamagedListing as error:
        problems = [str(error)]
    if problems:
        say(f"the cached tokenizer is damaged and will be trained again ({problems[0]})")
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(path))


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of what decides a document's tokens: those of its text and the chat template."""
    return digest_of([type(tokenizer).__name__, ids_hash(tokenizer), tokenizer.chat_template])


def ids_hash(tokenizer: Any) -> str:
    """Hash of what decides the token ids of a text: the whole fast tokenizer or the vocabulary, and special tokens."""
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content.pop("truncation", None)  # set by the last call, not part of the tokenizer
        content.pop("padding", None)
    else:
        content = dict(tokenizer.get_vocab())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest_of([content, special])
