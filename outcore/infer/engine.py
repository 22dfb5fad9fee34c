"""The engine: requests in, pieces of answers out, one pass after another over all layers.

A pass takes every running answer one token further (more where guesses were right) and reads chunks of prompts beside.
What may be called from other threads (`submit`, `cancel`, `call_soon`) only leaves a note; `step` alone touches the
model, so one thread owns it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.common.errors import AnswerFailed
from outcore.common.quantities import counted
from outcore.flow.trace import moment, wait_for
from outcore.infer.labels import Labels
from outcore.infer.passes import (
    DraftModel,
    OnScores,
    OnVectors,
    PassRunner,
    Texts,
    TextScores,
    TokenChoice,
    WaitingTexts,
)
from outcore.infer.requests import (
    Answer,
    Chosen,
    FinishReason,
    OnPiece,
    Request,
    Sampling,
    TextStream,
    derived_seed,
    seed_of,
)
from outcore.infer.schedule import Clock, Drafter, PassCost, Scheduler, Work, rows_of
from outcore.infer.schedule import Sequence as Running
from outcore.model.forward import Pooling

SHORT_PASS_S = 0.05
"""Seconds of a pass that text may wait for, so that it is told while the device computes the next one."""
MANY, APART_S = 16, 0.01
"""So many answers and more are told what they got so far apart, but for their first tokens and their ends: every
telling costs this thread and its listeners as much as a token's choice does."""


def always() -> bool:
    """True: whether texts are wanted of one who does not go away."""
    return True


@dataclass(frozen=True)
class Speech:
    """Tokenizer of a model, and what else the engine needs to know to read its output."""

    tokenizer: Any
    end_tokens: frozenset[int]
    vocab_size: int
    max_context: int | None
    """Positions that the model knows; None: unbounded."""
    labels: Labels | None = None
    """Labels that the model gives to texts; it writes none then."""
    pooling: Pooling = "mean"
    scores: bool = True
    """Whether texts can be scored."""


@dataclass
class EngineCounts:
    """Sums since the start."""

    passes: int = 0
    pass_s: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    last_pass_s: float = 0.0
    last_pass_rows: int = 0


@dataclass(eq=False)
class _Talk:
    """One request: its answers under way, who listens."""

    request: Request
    on_piece: OnPiece | None
    on_answer: Callable[[Answer], None] | None
    left: int


class InferenceEngine:
    """Engine that answers requests in passes over the layers. `verify` raises EngineError where what a pass computed
    cannot be trusted, before its tokens are taken; `waited_s` tells how long the device waited in the last pass, by
    what for, once its logits have been read."""

    def __init__(
        self,
        runner: PassRunner,
        scheduler: Scheduler,
        speech: Speech,
        *,
        speculates: bool = True,
        drafts: DraftModel | None = None,
        verify: Callable[[], None] = lambda: None,
        waited_s: Callable[[], Mapping[str, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.scheduler, self.speech = runner, scheduler, speech
        self.speculates = speculates and runner.can_step_back
        self.drafts = drafts
        self.counts = EngineCounts()
        self.observers: list[Callable[[Sequence[Work], float], None]] = []
        """Hear of each pass when it has run: what was in it, its seconds."""
        self._verify, self._waited_s, self._clock = verify, waited_s, clock
        device = runner.copies.device
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        """The current device is each thread's own, and graphs, streams and kernels are made on it."""
        self._lock = threading.RLock()  # a signal may come while its own thread has it, and cancels
        self._notes: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition(self._lock)
        self._talks: dict[str, _Talk] = {}
        self._texts = WaitingTexts(speech.vocab_size, speech.max_context, speech.pooling)
        self._running: dict[str, list[Running]] = {}
        self._untold: dict[Running, list[Chosen]] = {}
        """Tokens of answers whose listeners have not been told."""
        self._told_s = 0.0

    # --- from any thread

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and answer together."""
        most, limit = self.scheduler.cache.most_tokens(), self.speech.max_context
        return most if limit is None else min(limit, most)

    def check(self, request: Request) -> None:
        """ValueError when the request could never be answered."""
        self._check_writes()
        request.sampling.check_vocabulary(self.speech.vocab_size)
        if not 0 <= request.adapter < (count := len(self.scheduler.cache.settings.roots)):
            raise ValueError(f"adapter is {request.adapter}, but the model was opened with {count - 1}.")
        if any(not 0 <= token < self.speech.vocab_size for token in request.prompt):
            raise ValueError(f"the prompt has tokens outside the model's vocabulary of {self.speech.vocab_size}.")
        limit, asked = self.max_tokens, request.sampling
        if len(request.prompt) + asked.max_tokens > limit:
            raise ValueError(
                f"the prompt has {counted(len(request.prompt), 'token')} and {asked.length_name} is "
                f"{asked.max_tokens}: together more than the {limit} that fit. Shorten the "
                f"prompt or lower {asked.length_name}."
            )

    def submit(
        self,
        request: Request,
        on_piece: OnPiece | None = None,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> None:
        """Queue a request; the callbacks run on the engine's thread. ValueError when it could never be answered."""
        self.check(request)
        self._queue(_Talk(request, on_piece, on_answer, request.n))

    def submit_texts(
        self, texts: Texts, num_top: int, on_scores: OnScores, is_wanted: Callable[[], bool] = always
    ) -> None:
        """Have texts scored between passes, a portion at a time, unless they are wanted no longer; the callbacks run on
        the engine's thread. ValueError for texts that cannot be."""
        self._check_writes()
        self.check_texts(texts)
        self.call_soon(lambda: self._texts.add("scores", texts, on_scores, is_wanted, num_top))

    def submit_embeddings(self, texts: Texts, on_vectors: OnVectors, is_wanted: Callable[[], bool] = always) -> None:
        """Have texts turned into vectors; as `submit_texts`."""
        self.check_texts(texts)
        self.call_soon(lambda: self._texts.add("vectors", texts, on_vectors, is_wanted))

    def submit_labels(self, texts: Texts, on_vectors: OnVectors, is_wanted: Callable[[], bool] = always) -> None:
        """Have labels of texts scored; as `submit_texts`."""
        if self.speech.labels is None:
            raise ValueError("this model writes text and has no labels. Open one whose head classifies texts.")
        self.check_texts(texts)
        self.call_soon(lambda: self._texts.add("labels", texts, on_vectors, is_wanted))

    def check_texts(self, texts: Texts) -> None:
        """ValueError for texts that cannot be scored."""
        if not self.speech.scores:
            raise ValueError("this model answers about pictures; scores and vectors are of models of text.")
        self._texts.check(texts)

    def cancel(self, name: str) -> None:
        """End a request's answers before the next pass; unknown names do no harm (it may just have ended)."""
        self.call_soon(lambda: self._end_all(name, "cancelled"))

    def cancel_all(self) -> None:
        """End every answer before the next pass."""
        self.call_soon(self._end_everything)

    def call_soon(self, note: Callable[[], None]) -> None:
        """Have `note` called on the engine's thread between two passes."""
        with self._wake:
            self._notes.append(note)
            self._wake.notify_all()

    def wait_for_work(self, timeout_s: float) -> None:
        """Block until there is something to do, or for so long."""
        with self._wake:
            if not self._notes and not self._texts.is_any and self.scheduler.is_idle:
                self._wake.wait(timeout_s)

    # --- on the engine's thread

    @torch.inference_mode()
    def step(self, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Do what was noted and run one pass; False when nothing was to do. `meanwhile` is called once the pass has
        been queued on the device, before its results are waited for; what the pass before gave is told just then,
        where passes are short.

        What goes wrong in a pass ends the answers in it with "error", and is raised unless it was one request's own.
        """
        with self._on_device:
            return self._step(meanwhile)

    def _step(self, meanwhile: Callable[[], None]) -> bool:
        did = self._take_notes()
        if self._texts.is_any:
            did = True
            self._tell()
            self._texts.run(self.runner)
        self._end_late(self._clock())
        if self.drafts is not None:
            self.drafts.prepare(self.scheduler)
        now_s = self._clock()
        works = self.scheduler.next_pass(now_s)
        if self.scheduler.failed:
            did = True
            self._tell_failed()
        if not works:
            return did
        for work in works:
            work.begin_masks()
        try:
            found = self.runner.run(works)
            self._tell_due()
            meanwhile()
            self._accept(works, found)
        except Exception as error:
            for name in dict.fromkeys(work.sequence.request.name for work in works):
                self._end_all(name, "error", f"{type(error).__name__}: {error}")
            if isinstance(error, AnswerFailed):
                return True
            raise
        seconds, counts = self._clock() - now_s, self.counts
        counts.last_pass_s, counts.last_pass_rows = seconds, rows_of(works)
        counts.passes, counts.pass_s = counts.passes + 1, counts.pass_s + seconds
        if self.runner.is_usual:
            self.scheduler.cost.add(counts.last_pass_rows, seconds)
        for observer in self.observers:
            observer(works, seconds)
        if seconds >= SHORT_PASS_S or self.scheduler.is_idle:
            self._tell()
        else:
            self._tell([sequence for sequence in self._untold if sequence.finish is not None])
        return True

    def generate(self, requests: Iterable[Request], on_piece: OnPiece | None = None) -> Iterator[Answer]:
        """Answers as they end, until all have. ValueError for a request that could never be answered."""
        done: deque[Answer] = deque()
        names = set()
        for request in requests:
            names.add(request.name)
            self.submit(request, on_piece, done.append)
        left = True
        while left:
            left = self.step()
            while done:
                yield done.popleft()

    def warm_up(self, prompts_tokens: Sequence[int], answer: int = 4) -> float:
        """Answer requests of nobody's before the first one comes, one after another, so that what has to be made for
        prompts of such lengths, and answers of so many tokens, is; seconds. Lengths that do not fit are left out."""
        return sum(self._answer_nobody(count, answer) for count in prompts_tokens if count + answer <= self.max_tokens)

    def pass_s(self, tokens: int) -> float:
        """Seconds of a pass of so many tokens, or of all that fit, for nobody: the third one, because the second makes
        graphs."""
        return [self._answer_nobody(min(tokens, self.max_tokens - 1), 1) for _ in range(3)][-1]

    def _answer_nobody(self, prompt_tokens: int, answer_tokens: int) -> float:
        began = time.perf_counter()
        token = min(1, self.speech.vocab_size - 1)
        sampling = Sampling(temperature=0, max_tokens=answer_tokens, ignore_eos=True)
        speculates, self.speculates = self.speculates, False  # passes of a single token have code of their own
        self._queue(_Talk(Request("warm-up", (token,) * prompt_tokens, sampling), None, None, 1))
        while self.step():
            pass
        self.speculates, seconds = speculates, time.perf_counter() - began
        self.scheduler.cache.clear_prefixes()
        self.scheduler.cost, self.counts = PassCost(), EngineCounts()
        return seconds

    def score(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """log-probability of each token after the first, for each text. ValueError for texts that cannot be scored."""
        return [scores.logprobs.tolist() for scores in self.score_top(texts, 1)]

    def score_top(self, texts: Sequence[Sequence[int]], num_top: int) -> list[TextScores]:
        """Scores of each token after the first, with the `num_top` likeliest tokens there, for each text. ValueError
        for texts that cannot be scored."""
        self._check_writes()
        self.check_texts(texts)
        with torch.inference_mode(), self._on_device:
            return self.runner.score(texts, num_top)

    @property
    def has_texts(self) -> bool:
        """Whether texts wait to be scored."""
        return self._texts.is_any

    @property
    def num_running(self) -> int:
        """Answers that hold pages."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Answers that wait for room."""
        return len(self.scheduler.waiting)

    def close(self) -> None:
        """End everything under way and let the model go."""
        self._take_notes()
        self._end_everything()
        self.runner.close()

    # --- parts

    def _check_writes(self) -> None:
        if self.speech.labels is not None:
            raise ValueError("this model gives labels to texts and writes none: ask it to classify, or to rerank.")

    def _queue(self, talk: _Talk) -> None:
        arrived_s = self._clock()
        self.call_soon(lambda: self._admit(talk, arrived_s))

    def _take_notes(self) -> bool:
        with self._lock:
            notes, self._notes = self._notes, deque()
        for note in notes:
            note()
        return bool(notes)

    def _admit(self, talk: _Talk, arrived_s: float) -> None:
        request, sampling = talk.request, talk.request.sampling
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.speech.end_tokens)
        seed = sampling.seed if sampling.seed is not None else seed_of(request.name)
        before = request.prompt if request.goes_on else ()
        self._talks[request.name] = talk
        self._running[request.name] = []
        for choice in range(request.n):
            sequence = Running(
                request,
                choice,
                derived_seed(seed, choice),
                TextStream(self.speech.tokenizer, sampling.stop, before, keeps_special=request.keeps_special),
                Drafter(self.drafts is not None) if self.speculates else None,
                Clock(arrived_s),
                frozenset(ends),
            )
            self._running[request.name].append(sequence)
            self.scheduler.add(sequence)

    def _end_late(self, now_s: float) -> None:
        for name, talk in list(self._talks.items()):
            limit = talk.request.deadline_s
            if limit is not None and any(now_s - s.clock.arrived_s > limit for s in self._running.get(name, ())):
                self._end_all(name, "error", f"not finished within {limit:g} s")

    def _accept(self, works: list[Work], found: list[tuple[Work, torch.Tensor]]) -> None:
        """Choose tokens from the logits; a guess counts when it is what would have been chosen."""
        if not found:  # only prompts were read, and no logits: nothing else has waited for the device
            wait_for(moment(self.runner.copies.device), "a pass")
            self._verify()
        now_s = self._clock()
        right = dict.fromkeys((id(work) for work in works), 0)
        alive, place, choice = found, 0, TokenChoice(found, self.runner.copies.to)
        while alive:
            chosen = choice.at(place, alive)
            self._verify()  # what was chosen has come, and no answer has ended by it yet
            still: list[tuple[Work, torch.Tensor]] = []
            for (work, logits), token in zip(alive, chosen, strict=True):
                sequence = work.sequence
                tokens = self._untold.setdefault(sequence, [])
                if sequence in choice.lost:
                    sequence.finish, sequence.error = "error", choice.NO_NUMBERS
                    continue
                sequence.take(token, now_s)
                tokens.append(token)
                self.counts.answer_tokens += 1
                if place < work.num_drafts and work.guesses[place] == token.token:
                    right[id(work)] += 1
                    if sequence.finish is None:
                        still.append((work, logits))
            alive, place = still, place + 1
        waited_s = self._waited_s()
        for sequence in dict.fromkeys(work.sequence for work in works):
            sequence.passed(waited_s)
        for work in works:
            self._settle(work, right[id(work)])
        for sequence in dict.fromkeys(work.sequence for work in works if work.sequence.finish is not None):
            self._leave(sequence)

    def _settle(self, work: Work, right: int) -> None:
        sequence, counts = work.sequence, self.counts
        sequence.drafted, sequence.accepted = sequence.drafted + work.num_drafts, sequence.accepted + right
        counts.drafted, counts.accepted = counts.drafted + work.num_drafts, counts.accepted + right
        drafter = sequence.drafter
        if work.num_drafts and self.drafts is not None and drafter is not None and drafter.is_from_model:
            self.drafts.learn_from(work.num_drafts, right)
        stored = work.start + work.count - work.num_drafts + right
        if right < work.num_drafts and sequence.pages is not None and sequence.pages.states is not None:
            stored = sequence.pages.states.step_back()  # what was right is read again, with what was chosen behind it
        counts.prompt_tokens += max(0, min(stored, sequence.num_prompt) - work.start)
        self.scheduler.done(work, min(stored, len(sequence.tokens)))

    def _leave(self, sequence: Running) -> None:
        """Give up what an answer that has ended holds."""
        sequence.clock.ended_s = self._clock()
        self.scheduler.remove(sequence)

    def _tell_due(self) -> None:
        """Tell what the pass before gave, where it does not wait for more."""
        if len(self._untold) < MANY or self._clock() - self._told_s >= APART_S:
            self._tell()
        else:
            self._tell([sequence for sequence in self._untold if not sequence.is_told])

    def _tell(self, due: Sequence[Running] | None = None) -> None:
        """Tell these answers' listeners what was chosen for them; None: all."""
        untold = self._untold
        if due is None:
            due, self._told_s = list(untold), self._clock()
        for sequence in due:
            talk, tokens, sequence.is_told = self._talks[sequence.request.name], untold.pop(sequence), True
            text = sequence.say()
            if talk.on_piece is not None:
                talk.on_piece(sequence.piece(text, tokens))
            if sequence.finish is not None:
                self._ended(talk, sequence)

    def _ended(self, talk: _Talk, sequence: Running) -> None:
        if self.drafts is not None:
            self.drafts.forget(sequence)
        answer = sequence.ended()
        self.counts.finished[answer.finish] = self.counts.finished.get(answer.finish, 0) + 1
        self.counts.cached_tokens += sequence.cached_tokens
        talk.left -= 1
        if not talk.left:
            del self._talks[talk.request.name], self._running[talk.request.name]
        if talk.on_answer is not None:
            talk.on_answer(answer)

    def _tell_failed(self) -> None:
        failed, self.scheduler.failed = self.scheduler.failed, []
        for sequence in failed:
            self._leave(sequence)
            self._untold.setdefault(sequence, [])
        self._tell()

    def _end_everything(self) -> None:
        for name in list(self._talks):
            self._end_all(name, "cancelled")

    def _end_all(self, name: str, why: FinishReason, error: str = "") -> None:
        for sequence in self._running.get(name, []):
            if sequence.clock.ended_s is None:  # an answer may have got its last token in a pass that then failed
                self._leave(sequence)
                if sequence.finish is None:
                    sequence.finish, sequence.error = why, error
                self._untold.setdefault(sequence, [])
        self._tell()
