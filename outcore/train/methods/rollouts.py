"""Answers that a model is trained on while it learns (`--method grpo`, `rloo` ...): TRL's trainer, our engine.

TRL calls `Rollouts` for answers. They come from `outcore.infer` over the trainer's own weights, base and adapter as
they are in the homes that the optimizer changes. A prompt is read once for all its answers; keys and values are given
back before the backward pass. Tokens are drawn by (seed, step, prompt, answer): a resumed run draws the same ones.

How far the log-probabilities that tokens were drawn with lie from those that the trainer computes is measured each
step: both run transformers' layers, but one token at a time over pages, or all of a row at once."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import outcore.hf
from outcore.common.quantities import counted, format_gib
from outcore.config import ConfigError, TrainConfig
from outcore.data import DataError
from outcore.flow import StreamUnsupported
from outcore.infer import Sampling, Speech
from outcore.infer.opening import PagedLayers, paged_layers
from outcore.infer.rollouts import PAGE_TOKENS, group_pages, groups_of_answers, streamed_engine
from outcore.machine import available_ram_bytes
from outcore.model import LoadedModel
from outcore.model.facts import model_facts
from outcore.model.forward import unwrap
from outcore.sizing.streaming import ROLLOUT_ANSWERS, ROLLOUT_TOKENS
from outcore.train.methods.on_policy import TeacherRewards
from outcore.train.methods.rewards import TIMEOUT_S, RewardProcess, Rewards, judge_of
from outcore.train.methods.rows import without_gaps

RAM_SHARE = 0.5
"""Share of the free RAM that keys and values may take on a CPU: the backward pass wants the rest."""


class Rollouts:
    """Answers of the model that is trained: TRL's trainer calls this (its `rollout_func`)."""

    def __init__(
        self, config: TrainConfig, tokenizer: Any, say: Callable[[str], None], teacher: TeacherRewards | None
    ) -> None:
        self._seed, self._tokenizer, self._say, self._has_said_room = config.seed, tokenizer, say, False
        self.answers = config.num_generations or ROLLOUT_ANSWERS
        self._answer_tokens = config.max_completion_length or ROLLOUT_TOKENS
        self._process: RewardProcess | None = None
        if teacher is None:
            judge = judge_of(config)
            self._process = RewardProcess(judge, config.reward_timeout_s or TIMEOUT_S)
            skips = config.on_bad_reward == "skip"
            self.rewards = Rewards(self._process, judge, self.answers, skips=skips, say=say)
        else:
            self.rewards = teacher
        self._paged: PagedLayers
        self.tokens_before = 0
        """Tokens that the trainer had seen before the last call."""
        self.random_before: torch.Tensor
        """State of torch's random numbers before the epoch, whose first step draws some for its rows."""

    def open(self, opened: ExitStack) -> None:
        """Start the process that judges, which `opened` ends. RewardError where the function cannot be had."""
        if self._process is not None:
            opened.callback(self._process.close)
            self._process.start()

    def see(self, loaded: LoadedModel) -> None:
        """Look at the plain model. ConfigError where it cannot be answered with while it is trained."""
        try:
            self._paged = paged_layers(loaded)
        except StreamUnsupported as error:
            raise ConfigError(f"method: answers of this model while it is trained: {error}") from error

    def arguments(self) -> dict[str, Any]:
        """Settings of TRL's trainer."""
        return {"num_generations": self.answers, "max_completion_length": self._answer_tokens}

    def encode(self, prompt: Any) -> list[int]:
        """Tokens of a prompt, a text or messages, behind which the answer begins."""
        if isinstance(prompt, str):
            return self._tokenizer(text=prompt)["input_ids"]
        talk = without_gaps(prompt)
        return self._tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]

    def trainer_of(self, base: Any) -> Any:
        """TRL's trainer, with what is measured and stepped over."""
        return _rollout_trainer(base, self)

    def begin_epoch(self, sampler: Any, epoch: int) -> None:
        """Have TRL's sampler draw the order of this epoch's prompts, also where a resumed run draws no earlier one."""
        self.random_before = torch.get_rng_state()
        sampler.generator.manual_seed(self._seed)
        for _ in range(epoch):
            next(iter(sampler))

    def fitting(self, rows: Sequence[dict[str, Any]], length: int) -> list[dict[str, Any]]:
        """Rows that leave room for an answer; the others are said by number. DataError where none does, or where a
        prompt is none to the chat template."""
        room, long = length - self._answer_tokens, dict[int, int]()
        for row in rows:
            try:
                tokens = len(self.encode(row["prompt"]))
            except Exception as error:  # a template is anybody's code
                raise DataError(f"prompt {row['number']}: the chat template takes it not: {error}") from error
            if not 0 < tokens <= room:
                long[row["number"]] = tokens
        if not long:
            return list(rows)
        numbers = ", ".join(f"{number} ({tokens} tokens)" for number, tokens in list(long.items())[:8])
        words = (
            f"{counted(len(long), 'prompt')} leave{'s' * (len(long) == 1)} no room within seq_length {length} for "
            f"answers of {self._answer_tokens} tokens: {numbers}{', ...' * (len(long) > 8)}"
        )
        if len(long) == len(rows):
            raise DataError(f"All {words}. Raise --seq_length, or lower --max_completion_length.")
        self._say(f"WARNING: {words}. They are left out.")
        return [row for row in rows if row["number"] not in long]

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        model, answers = trainer.accelerator.unwrap_model(trainer.model), trainer.num_generations
        step, self.tokens_before = trainer.state.global_step, trainer.state.num_input_tokens_seen
        texts = [self.encode(prompt) for prompt in prompts[::answers]]
        named = [
            (f"{self._seed} {step} {place} {hashlib.sha256(json.dumps(ids).encode()).hexdigest()}", ids)
            for place, ids in enumerate(texts)
        ]
        most = max(map(len, texts)) + self._answer_tokens
        speech = Speech(
            self._tokenizer, frozenset(trainer.eos_token_ids), model_facts(unwrap(model)).vocab_size, most, scores=False
        )
        sampling = Sampling(max_tokens=self._answer_tokens, logprobs=0, length_name="max_completion_length")
        pages = self._pages(model, [group_pages(len(ids), answers, self._answer_tokens) for ids in texts], most)
        with streamed_engine(model, self._paged, speech, pages) as engine:
            groups = groups_of_answers(engine, named, answers, sampling)
        found = [answer for group in groups for answer in group]
        said: dict[str, list[Any]] = {
            "prompt_ids": [ids for ids in texts for _ in range(answers)],
            "completion_ids": [[chosen.token for chosen in answer.tokens] for answer in found],
            "logprobs": [[chosen.logprob for chosen in answer.tokens] for answer in found],
        }
        if isinstance(self.rewards, TeacherRewards):
            self.rewards.answered = said
        return said

    def _pages(self, model: Any, groups: Sequence[int], most_tokens: int) -> int:
        """Pages that there is room for; with fewer than `groups` take some answers wait for others. RuntimeError where
        there are too few for the longest answer."""
        page_bytes = PAGE_TOKENS * self._paged.token_bytes(model.dtype)
        room_bytes = outcore.hf.room_bytes(model)
        if room_bytes is None:
            room_bytes = int(RAM_SHARE * available_ram_bytes())
        wanted, least = sum(groups), -(-most_tokens // PAGE_TOKENS)
        pages = min(wanted, max(0, room_bytes) // page_bytes)
        if pages < least:
            raise RuntimeError(
                f"rollouts: keys and values of one answer take {format_gib(least * page_bytes)}, and there is room for "
                f"{format_gib(pages * page_bytes)}. Lower --seq_length and --max_completion_length, or free memory."
            )
        if pages < wanted and not self._has_said_room:
            self._has_said_room = True
            self._say(
                f"rollouts: keys and values of all answers take {format_gib(wanted * page_bytes)}, and there is room "
                f"for {format_gib(pages * page_bytes)}: some answers wait for others, and a resumed run needs as much "
                "room to get the same ones"
            )
        return pages


def _rollout_trainer(base: Any, rollouts: Rollouts) -> Any:
    """TRL's trainer `base` that measures how far rollouts lie from it, and learns nothing of a prompt left out."""
    rewards: Rewards | TeacherRewards = rollouts.rewards
    is_rloo = "rollout_func" not in inspect.signature(base).parameters
    own = ["_get_train_sampler", "_get_per_token_logps_and_entropies", "_compute_loss"]
    own += ["_generate_and_score_completions", *["_tokenize_prompts", "_generate_single_turn"] * is_rloo]
    if missing := [name for name in own if not hasattr(base, name)]:
        raise ConfigError(f"method: this TRL's {base.__name__} has no {', '.join(missing)}. pip install trl==1.16")
    if is_rloo:
        base = _taking_rollouts(base)

    class RolloutTrainer(base):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            sampler = super()._get_train_sampler(*args, **kwargs)
            sampler.set_epoch = partial(rollouts.begin_epoch, sampler)
            return sampler

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._generate_and_score_completions(*args, **kwargs)
            if isinstance(rewards, TeacherRewards):
                found["advantages"] = rewards.advantages.to(found["advantages"].device)
            else:  # as TRL masks truncated answers: no advantage of 0 switches off the KL in a loss
                left_out = torch.tensor(rewards.left_out)
                for of_answers in {"completion_mask", "old_logps"} & found.keys():
                    found[of_answers][left_out] = 0
                if "num_items_in_batch" in found:
                    found["num_items_in_batch"] = found["completion_mask"].sum()
            return found

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self._computed = found[0].detach()
            return found

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            mask, told = inputs["completion_mask"].bool(), self._metrics["train"]
            before = {name: list(values) for name, values in told.items()}
            loss = super()._compute_loss(model, inputs)
            if getattr(self, "loss_type", "grpo") == "grpo" and not all(rewards.left_out):  # a mean of all answers
                loss = loss * (len(rewards.left_out) / rewards.left_out.count(False))
            if not mask.any():  # TRL's means over no token are 0, which would count in those of the step
                told.clear()
                told.update(before)
            off = (self._computed - inputs["sampling_per_token_logps"])[mask].double()
            told["mismatch"].append(off.abs().mean().item())
            told["mismatch_max"] = [max([0.0, *off.abs().tolist(), *told["mismatch_max"]])]
            told["mismatch_kl"].append((off.exp() - 1 - off).mean().item())
            told["prompts_left_out"] = [sum(rewards.left_out) // rollouts.answers]
            told["skipped"] = [all(rewards.left_out)]
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            if all(rewards.left_out):  # else the optimizer would go on by its moments
                self.model.zero_grad(set_to_none=True)
            return loss

    return RolloutTrainer


def _taking_rollouts(base: Any) -> Any:
    """TRL's RLOOTrainer `base`, which itself takes no `rollout_func`, with one as GRPOTrainer has it."""

    class TakingRollouts(base):
        def __init__(self, *args: Any, rollout_func: Rollouts, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._answer = rollout_func

        def _tokenize_prompts(self, prompts: list[Any]) -> Any:
            self._answers = self._answer(prompts, self)
            return self._answers["prompt_ids"], None, {}

        def _generate_single_turn(self, *_: Any) -> Any:
            return self._answers["completion_ids"]

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._generate_and_score_completions(*args, **kwargs)
            padded = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, self._answers["logprobs"])], batch_first=True)
            return found | {"sampling_per_token_logps": padded.to(found["completion_ids"].device)}

    return TakingRollouts
