"""Passes of a model that sees: transformers' own `generate`, one token of one answer a pass.

`generate` keeps what such models need between tokens (positions of several axes, caches of their own), and calls back
before it chooses a token. Each answer's call runs on a thread of its own, which waits there: the engine takes the
logits, chooses as for every other model, and lets it go on with that token."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from outcore.common.errors import AnswerFailed, EngineError, line_of
from outcore.infer.passes.runner import Found, WritesOnly
from outcore.infer.requests import Request
from outcore.infer.schedule import Work
from outcore.staging.pool import SmallCopies

logger = logging.getLogger(__name__)
OUR_ERRORS = (EngineError, OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of memory, drives and devices, which the next answer would meet, too."""
OUR_WORDS = "CUDA", "cuBLAS", "cuDNN", "allocate memory"
"""Words of such errors where torch tells them as a RuntimeError."""


class SeeingRunner(WritesOnly):
    """Runner of one sequence at a time: some of these models keep the positions of the last one in themselves."""

    can_step_back = False
    is_usual = True

    def __init__(self, model: Any, device: torch.device) -> None:
        self.copies, self._model = SmallCopies(device), model

    def run(self, works: Sequence[Work]) -> Found:
        (work,) = works
        if work.pages.states is None:  # kept with its pages, which are closed when the answer ends
            assert work.start == 0, "`generate` reads the whole prompt itself"
            work.pages.states = GenerateCall(self._model, work.sequence.request, self.copies.device)
        return [(work, work.pages.states.logits_after(work.tokens[-1]))]

    def close(self) -> None:
        return


class GenerateCall:
    """A call of `generate` that waits for each token. It ends when nobody keeps it any more."""

    def __init__(self, model: Any, request: Request, device: torch.device) -> None:
        self._found: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._has_begun = False
        given = (model, request, device, self._found, self._tokens)
        self._thread = threading.Thread(target=_generate, args=given, name="generate", daemon=True)

    def logits_after(self, token: int) -> torch.Tensor:
        """Logits [1, V] of what comes behind this token; behind the whole prompt at first."""
        if self._has_begun:
            self._tokens.put(token)
        else:
            self._has_begun = True
            self._thread.start()
        found = self._found.get()
        if not isinstance(found, BaseException):
            return found
        try:
            raise found
        finally:
            del found  # its traceback has this frame, which would keep both, and this call, for the garbage collector

    def __del__(self) -> None:
        self._tokens.put(None)
        if self._has_begun:  # it gives the model's own configuration back
            self._thread.join()


class _Ended(BaseException):
    """Nobody wants further tokens."""


class _Asking(LogitsProcessor):
    """Has the engine choose."""

    def __init__(self, found: queue.SimpleQueue[Any], tokens: queue.SimpleQueue[int | None]) -> None:
        self._found, self._tokens = found, tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._found.put(scores)
        token = self._tokens.get()
        if token is None:
            raise _Ended
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, token] = 0.0
        return chosen


def _generate(
    model: Any,
    request: Request,
    device: torch.device,
    found: queue.SimpleQueue[Any],
    tokens: queue.SimpleQueue[int | None],
) -> None:
    """Run on the call's thread, until its answer has ended."""
    ids = torch.tensor([request.prompt], device=device)
    inputs = {name: torch.as_tensor(value).to(device) for name, value in request.seen.items()}
    inputs = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    length = request.sampling.max_tokens + 1  # the engine ends the answer, never `generate`
    own, model.generation_config = model.generation_config, GenerationConfig()  # which would change the logits
    try:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **inputs,
            do_sample=False,
            max_new_tokens=length,
            logits_processor=LogitsProcessorList([_Asking(found, tokens)]),
        )
    except _Ended:
        return
    except BaseException as error:  # told where the logits are waited for
        traceback.clear_frames(error.__traceback__)  # which hold pictures and activations
        found.put(error if _is_ours(error) else _failed(error))
    finally:
        model.generation_config = own


def _is_ours(error: BaseException) -> bool:
    """Whether it is the engine's failure rather than one request's."""
    says_so = isinstance(error, RuntimeError) and any(word in str(error) for word in OUR_WORDS)
    return says_so or isinstance(error, OUR_ERRORS) or not isinstance(error, Exception)


def _failed(error: BaseException) -> AnswerFailed:
    """The error of one answer. Its traceback is logged here, since nobody raises it further."""
    logger.warning("an answer about pictures failed\n%s", "".join(traceback.format_exception(error)))
    return AnswerFailed(f"this model cannot answer the request ({line_of(error)})")
