"""A teacher behind an address: a server with OpenAI's routes that tells `prompt_logprobs`, as vLLM's does.

Rows go as tokens, so that nothing is encoded twice; that both have the same tokens is tried on the first row."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from outcore.config import ConfigError
from outcore.data import RowDataset
from outcore.data.cache import Target

TOP = 20
"""Likeliest tokens that are asked for: vLLM's limit where its server is told nothing (--max-logprobs)."""
AT_ONCE = 16
TIMEOUT_S = 600
IGNORED = -100


class TeacherServer:
    """The model at an address. ConfigError, in words, for what it does not tell."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/").removesuffix("/v1")
        self.name: str = self._asked("/v1/models")["data"][0]["id"]

    def check_tokens(self, text: str, tokenizer: Any) -> None:
        """ConfigError where it has other tokens than the student."""
        body = {"model": self.name, "prompt": text, "add_special_tokens": False}
        if self._asked("/tokenize", body)["tokens"] != tokenizer.encode(text, add_special_tokens=False):
            raise ConfigError(f"teacher: {self._address} has other tokens than the student; they must be the same.")

    def said_of(self, rows: RowDataset, chunk: Sequence[int]) -> Iterator[Target]:
        """Yield what it says of each row's tokens that bear loss."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = threads.map(lambda row: self._row(rows.batch([row])), chunk)
            for row, said in zip(chunk, found, strict=True):
                yield Target(np.concatenate(rows.documents_of(row)), *said)

    def _row(self, batch: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[0].bool()
        ids, labels = batch["input_ids"][0][mask].tolist(), batch["labels"][0][mask].tolist()
        body = {"model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": TOP}
        said = self._asked("/v1/completions", body)
        own, tops, logprobs = list[float](), list[list[int]](), list[list[float]]()
        try:
            told = said["choices"][0]["prompt_logprobs"]
            for at, (label, here) in enumerate(zip(labels, told, strict=True)):
                if at and label != IGNORED:  # the row's own token is told as well, whatever its rank
                    own.append(here[str(ids[at])]["logprob"])
                    ranked = sorted((one["rank"], int(token), one["logprob"]) for token, one in here.items())[:TOP]
                    tops.append([token for _, token, _ in ranked])
                    logprobs.append([logprob for *_, logprob in ranked])
            return np.array(own, np.float32), np.array(tops, np.int32), np.array(logprobs, np.float32)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"teacher: {self._address} does not tell prompt_logprobs of each token, as vLLM does."
            ) from error

    def _asked(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            words = error.read(500).decode(errors="replace")
            raise ConfigError(f"teacher: {self._address}{path} answers {error.code}: {words}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"teacher: {self._address}{path} does not answer ({error}). Is the server up?") from error
