"""ZeRO-3 whose optimizer step is ours: DeepSpeed gathers, partitions and reduces; shares and states live with us.

`StagedOptimizer` replaces four things of DeepSpeed's stage-3 optimizer: where the shares of parameters and gradients
lie and what states there are (`homes`), what becomes of a gradient, and the step. Gradients may go to the drive
(`gradients`). Non-finite gradients skip the step as in DeepSpeed; the norm is exact and known before any state changes.
A share that got no gradient in a step is updated with zero, where DeepSpeed takes what an earlier step left in its
buffer.

Names with leading underscores are DeepSpeed 0.19.8's; `binding` refuses other versions."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm

from outcore.engine.deepspeed.environment import accelerator
from outcore.engine.deepspeed.staged.homes import HousedZero3
from outcore.engine.deepspeed.staged.session import StagedSession
from outcore.engine.deepspeed.staged.states import Share
from outcore.optim import AdamWHyper
from outcore.sizing.staged import NORM_NUMEL


class StagedOptimizer(HousedZero3):
    """ZeRO-3's optimizer over shared states. `session` comes first, the rest is DeepSpeed's call."""

    def __init__(self, session: StagedSession, *args: Any, **kwargs: Any) -> None:
        self.updates = 0
        self.seed = 0
        self._begun: set[int] = set()
        """`ds_id` of the shares that got a gradient since the last step."""
        super().__init__(session, *args, **kwargs)

    # --- gradients

    def _offload_grad_partition_at_boundary(
        self, param: Any, grad_buffer: Any, offload_fp32_gradients: Any, offload_fp32_offsets: Any
    ) -> None:
        """The gradient stays where it was accumulated; only its norm is taken."""
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad_buffer)

    def _constant_buffered_norm2(self, input: torch.Tensor, buffer_size: int = NORM_NUMEL) -> torch.Tensor:
        """DeepSpeed's, in smaller pieces."""
        return super()._constant_buffered_norm2(input, buffer_size)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> None:
        """Reduced gradients go to where they are summed: in RAM by DeepSpeed, on the drive by us."""
        begin: list[tuple[Any, torch.Tensor]] = []
        go_on: list[tuple[Any, torch.Tensor]] = []
        for param, part in zip(params_to_release, grad_partitions, strict=True):
            is_first = self.micro_step_id == 0 or param.ds_id not in self._begun
            self._begun.add(param.ds_id)
            if self._has_grad_on_drive(param):
                self._to_drive(param, part, is_first=is_first)
            else:
                if is_first and self.session.params is not None:
                    self.session.params.loans.reclaim(param)
                (begin if is_first else go_on).append((param, part))
        micro_step_id = self.micro_step_id
        for pairs, step_id in ((begin, 0), (go_on, micro_step_id)):
            self.micro_step_id = step_id  # 0: DeepSpeed overwrites what an earlier step left instead of adding to it
            super().partition_grads([param for param, _ in pairs], [part for _, part in pairs])
        self.micro_step_id = micro_step_id

    def _to_drive(self, param: Any, part: torch.Tensor, *, is_first: bool) -> None:
        assert self.session.gradients is not None
        is_last = self.is_gradient_accumulation_boundary()
        value = self.session.gradients.add(
            param.ds_id, part, micro_step=self.micro_step_id, is_first=is_first, is_last=is_last
        )
        if is_last:
            self._offload_grad_partition_at_boundary(param, value, None, None)
        if param.grad is not None and not accelerator().is_synchronized_device():
            param.grad.record_stream(accelerator().current_stream())
        param.grad = None

    def _settle_gradients(self) -> None:
        """Every gradient is where the update reads it, with its norm, or counts as zero."""
        if self.reduce_and_partition_stream is not None:
            self.reduce_and_partition_stream.synchronize()  # a late copy would overwrite a parameter that is lent it
        if self.session.gradients is not None:
            self.session.gradients.settle()
        for ds_id, share in self._shares.items():
            share.has_grad = ds_id in self._begun
            share.is_zeroed = share.is_zeroed and not share.has_grad
            if share.has_grad and share.numel and self.get_param_id(share.param) not in self.norm_for_param_grads:
                self._offload_grad_partition_at_boundary(share.param, self._read_gradient(share), None, None)
        self._begun.clear()

    def _read_gradient(self, share: Share) -> torch.Tensor:
        """On the device: of a share that was not used by the last micro-batch, where norms are taken on the way."""
        if share.grad is not None:
            return share.grad.to(accelerator().current_device_name())
        assert self.session.gradients is not None
        return self.session.gradients.read(share.ds_id)

    # --- the step

    def step(self, closure: Any = None) -> None:
        """AdamW on every share, with DeepSpeed's norm, clipping, loss scaling and skipping of non-finite steps."""
        self._settle_gradients()
        self._pre_step()
        self._partition_all_parameters()
        norm = combine_grad_norm_groups(self._get_norm_groups())  # of the gradients as they are, loss scale included
        self.overflow = bool(is_invalid_grad_norm(norm))
        scale = float(self.loss_scale)  # what the gradients carry, which the next line may change
        if self._loss_scale_update_and_overflow_cleanup():
            return
        self._global_grad_norm = norm / scale
        if self.session.params is not None:
            self.session.params.drop_ahead()
            self.session.params.loans.reclaim_all()
            self.session.params.synchronize_writes()
        self.updates += 1
        grad_scale = 1.0 / (scale * self._clip_factor(float(norm) / scale))
        self.states.update(lambda group: self._hyper(group, grad_scale))
        self._lend_gradient_memory()
        self._copy_to_device()
        self._post_step(set())

    def _lend_gradient_memory(self) -> None:
        """What was updated on the drive is read from where its gradient was, by every rank alike."""
        if self.session.params is None:
            return
        lent: set[int] = set()
        for share in self._shares.values():
            if share.loan is not None:
                share.is_zeroed = False
                self.session.params.loans.lend(share.param, share.loan)
                lent.add(share.ds_id)
        self.session.params.written_behind(lent, self.states.wait_written)

    def _copy_to_device(self) -> None:
        for share in self._shares.values():
            if share.on_device is not None and share.home is not None:
                share.on_device.copy_(share.home)

    def _clip_factor(self, norm: float) -> float:
        """Divisor of the gradients so that their norm is at most `clip_grad` (DeepSpeed's formula)."""
        return max(1.0, (norm + 1e-6) / self.clip_grad) if self.clip_grad > 0 else 1.0

    def _hyper(self, param_group: int, grad_scale: float) -> AdamWHyper:
        group = self.optimizer.param_groups[param_group]
        return AdamWHyper(
            lr=float(group["lr"]), step=self.updates, beta1=group["betas"][0], beta2=group["betas"][1],
            eps=group["eps"], weight_decay=group["weight_decay"], grad_scale=grad_scale, seed=self.seed,
        )  # fmt: skip

    # --- shares and states as checkpoints see them

    def settle(self) -> None:
        """Nothing under way on the drive, so that shares and states may be read and written from outside."""
        if self.session.params is not None:
            self.session.params.drop_ahead()
            self.session.params.synchronize_writes()
        self.states.settle()

    def begin_restore(self) -> None:
        """Shares will be written from outside: what is whole on the device, and what is lent, is let go."""
        self._partition_all_parameters()
        self.settle()
        if self.session.params is not None:
            self.session.params.loans.reclaim_all()

    def publish(self) -> None:
        """After shares were written from outside: whatever the device holds of them is made anew."""
        self.states.flush()
        self._copy_to_device()
        if len(self.persistent_parameters) > 0:
            self.persistent_parameters[0].all_gather(self.persistent_parameters)
