"""Dynamic loss scaling for fp16, with DeepSpeed's rules, so that either engine goes on from the other's state.

Rules (deepspeed/runtime/fp16/loss_scaler.py): an overflow uses up one of `hysteresis` allowances, then halves the
scale; `window` steps without one double it and restore the allowances."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.engine.base import EngineError


@dataclass
class LossScaler:
    """`enabled` False: the scale is 1 and nothing changes it (bf16, fp32)."""

    enabled: bool
    cur_scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 2

    def __post_init__(self) -> None:
        if not self.enabled:
            self.cur_scale = 1.0
        if self.cur_scale <= 0 or self.window < 1 or self.hysteresis < 1 or self.min_scale <= 0:
            raise ValueError(
                "loss scaling needs positive scales, a window and hysteresis of at least 1; got "
                f"scale {self.cur_scale}, min_scale {self.min_scale}, window {self.window}, "
                f"hysteresis {self.hysteresis}"
            )
        self.cur_hysteresis = self.hysteresis

    def update(self, overflow: bool) -> None:
        """After a step. EngineError when the gradients overflow even at the lowest scale."""
        if not self.enabled:
            return
        if overflow:
            if self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
            elif self.cur_scale <= self.min_scale:
                raise EngineError(
                    f"fp16 gradients overflow even at the lowest loss scale ({self.min_scale:g}), so no step can be "
                    "made. Lower --learning_rate, or train in bf16; the last checkpoint is intact."
                )
            else:
                self.cur_scale = max(self.cur_scale / 2, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        else:
            stable_steps = self.cur_iter - self.last_overflow_iter - 1
            if stable_steps > 0 and stable_steps % self.window == 0:
                self.cur_hysteresis = self.hysteresis
                self.cur_scale *= 2
        self.cur_iter += 1

    _SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def state(self) -> dict[str, float]:
        """For a checkpoint; empty when not enabled."""
        return {name: getattr(self, name) for name in self._SAVED} if self.enabled else {}

    def restore(self, state: dict[str, float]) -> None:
        """What `state` returned; what is missing stays."""
        for name in self._SAVED if self.enabled else ():
            if name in state:
                setattr(self, name, type(getattr(self, name))(state[name]))
