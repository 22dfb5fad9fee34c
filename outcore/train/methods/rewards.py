"""Rewards of answers: a function of the user's, or a verifier, in a process of its own, one prompt's answers at a time.

So a fault is known by its prompt, a function that hangs is ended after a time, and one that crashes takes nothing with
it. As asked, a fault ends the run, with the steps before it saved, or leaves the prompt out of its step."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outcore.common.os_layer import apart_options, kill_with_children
from outcore.common.quantities import counted
from outcore.config import ConfigError, TrainConfig
from outcore.sizing.streaming import ROLLOUT_ANSWERS
from outcore.train.methods.rows import TASK, without_gaps

TIMEOUT_S = 60.0
"""Seconds to judge the answers to a prompt, where nobody says."""
START_S = 120.0
"""Seconds for the function's imports at least."""
MOST = 1e18
"""Rewards are less: TRL squares them in fp32."""


class RewardError(ValueError):
    """Answers to a prompt could not be judged."""


class RewardProcess:
    """The process with the function `name`: FILE.py:NAME, or one of ours. It is started anew when it is gone."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self.tried: list[str] = []
        """Words for what the answers that were judged last reached for in vain."""
        self._child: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Have it ready. RewardError where the function cannot be had."""
        judge = str(Path(__file__).with_name("judge.py"))
        self._child = subprocess.Popen(
            [sys.executable, judge, self._name, str(self._timeout_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, encoding="utf-8", **apart_options(),
        )  # fmt: skip
        self._replies = queue.SimpleQueue()
        for hear in (_listen, _await_end):  # what it forked holds the pipe open when it is gone itself
            threading.Thread(target=hear, args=(self._child, self._replies), name="rewards", daemon=True).start()
        try:
            self._reply(max(self._timeout_s, START_S))
        except RewardError:
            self.close()
            raise

    def ask(self, asked: dict[str, Any]) -> list[float | None]:
        """Rewards by the function. RewardError for what it did instead."""
        if self._child is None:
            self.start()
        assert self._child is not None and self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone: the reply says so
            self._child.stdin.write(json.dumps(asked) + "\n")
            self._child.stdin.flush()
        return self._reply(self._timeout_s)

    def close(self) -> None:
        """End the process and what it started."""
        if self._child is not None:
            assert self._child.stdin is not None
            kill_with_children(self._child)
            self._child.wait()
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
            self._child = None

    def _reply(self, timeout_s: float) -> list[float | None]:
        assert self._child is not None
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise RewardError(
                f"{self._name} gave no answer within {timeout_s:g} s and was ended (--reward_timeout_s)."
            ) from None
        if line is None:
            code = self._child.wait()
            self.close()
            raise RewardError(f"{self._name} ended its process (exit code {code}).")
        said = json.loads(line)
        if "error" in said:
            raise RewardError(f"{self._name} raised {said['error']}.")
        self.tried = said["tried"]
        return said["rewards"]


def _listen(child: subprocess.Popen[str], replies: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            replies.put(line)


def _await_end(child: subprocess.Popen[str], replies: queue.SimpleQueue[str | None]) -> None:
    child.wait()
    replies.put(None)


def judge_of(config: TrainConfig) -> str:
    """Name of the function that judges a run's answers. ConfigError where nothing says, or two do."""
    tasks = [name.startswith(TASK) for name in config.dataset]
    if all(tasks) == (config.reward_function is not None) or any(tasks) != all(tasks):
        raise ConfigError(
            f"reward_function: tasks of reasoning-gym (--dataset {TASK}NAME) judge answers to themselves alone; for "
            "other data say who judges (--reward_function FILE.py:NAME, math_verify or code)."
        )
    return config.reward_function or TASK.rstrip(":")


def check_batch(config: TrainConfig, step_answers: int) -> None:
    """ConfigError where a step's answers, of micro-batches together, are not of whole prompts."""
    if step_answers % (answers := config.num_generations or ROLLOUT_ANSWERS):
        raise ConfigError(
            f"num_generations: a step has {step_answers} rows (batch_size x grad_accum), each an answer, which are not "
            f"whole prompts of {answers} answers. Give --num_generations {step_answers} or a divisor of it, or a batch "
            f"that {answers} divides."
        )


class Rewards:
    """Judge of a run's answers, as TRL calls it: `answers` to each prompt, one prompt after the other. `skips`: a
    prompt whose answers cannot be judged is left out of its step; else it ends the run."""

    def __init__(
        self, process: RewardProcess, name: str, answers: int, *, skips: bool, say: Callable[[str], None]
    ) -> None:
        self.__name__ = name.rpartition(":")[2]
        self.left_out: list[bool] = []
        """Whether each answer of the last call is to a prompt that is left out."""
        self._process, self._answers, self._skips, self._say, self._has_said_equal = process, answers, skips, say, False

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], number: Sequence[int], columns: Sequence[str],
        trainer_state: Any, **given: Any,
    ) -> list[float | None]:  # fmt: skip
        found, equal = list[float | None](), list[tuple[int, float | None]]()
        self.left_out = []
        for at in range(0, len(prompts), self._answers):
            these = slice(at, at + self._answers)
            rows = [json.loads(row) for row in columns[these]]
            asked = {name: [row[name] for row in rows] for name in rows[0]}
            asked |= {"prompts": list(map(without_gaps, prompts[these])), "completions": completions[these]}
            asked["completion_ids"] = given["completion_ids"][these]
            try:
                rewards = self._checked(self._process.ask(asked))
            except RewardError as error:
                words = f"step {trainer_state.global_step + 1}: prompt {number[at]}: {error}"
                if not self._skips:
                    raise RewardError(words) from error
                self._say(f"WARNING: {words} Its answers are left out of this step.")
                self.left_out += [True] * self._answers
                found += [None] * self._answers
                continue
            self.left_out += [False] * self._answers
            if self._process.tried:
                words = f"step {trainer_state.global_step + 1}: prompt {number[at]}: {'; '.join(self._process.tried)}"
                self._say(f"WARNING: {words}. In the sandbox this fails, and the reward is 0.")
            if len(set(rewards)) == 1:
                equal.append((number[at], rewards[0]))
            found += rewards
        if equal and len(equal) * self._answers == self.left_out.count(False) and not self._has_said_equal:
            self._has_said_equal = True
            each = ", ".join(f"prompt {which}: {reward}" for which, reward in equal[:4])
            self._say(
                f"WARNING: step {trainer_state.global_step + 1}: all answers to a prompt got the same reward ({each}"
                f"{', ...' * (len(equal) > 4)}), so nothing is learned from them. This is said once; "
                "frac_reward_zero_std in the log tells the share of such prompts."
            )
        return found

    def _checked(self, rewards: list[float | None]) -> list[float | None]:
        if len(rewards) != self._answers:
            raise RewardError(
                f"{self.__name__} returned {counted(len(rewards), 'reward')} for {counted(self._answers, 'answer')}."
            )
        for place, reward in enumerate(rewards):
            if reward is not None and not abs(reward) < MOST:
                raise RewardError(f"{self.__name__} returned {reward} for answer {place + 1}, which is no reward.")
        return rewards
