"""ZeRO-3 whose optimizer step is ours: DeepSpeed gathers, partitions and reduces; shares and states live with us.

`StagedOptimizer` replaces four things of DeepSpeed's stage-3 optimizer: where the shares of parameters and gradients
lie and what states there are (`homes`), what becomes of a gradient, and the step. Gradients may go to the drive
(`gradients`). Non-finite gradients skip the step as in DeepSpeed; the norm is exact and known before any state changes.
A share that got no gradient in a step is updated with zero, where DeepSpeed takes what an earlier step left in its
buffer.

Names with leading underscores are DeepSpeed 0.19.8's; `binding` refuses other versions.

ZeRO-3 whose shares live with us: the homes of parameters and gradients, and the states, are made here.

DeepSpeed's stage-3 optimizer sets itself up by calling the methods below. Shares of parameters and gradients lie in
exact, pinned slabs instead of its buffers; states are chunks of `outcore.optim` instead of fp32 flat buffers. Bytes of
RAM per parameter with everything in RAM: 2 (parameter) + 2 (gradient) + the states' format (10 for split, 12 for fp32).
Parameters (`params`), gradients (`gradients`) and states (`states`) may live on the drive instead. Of parameters, RAM
for them holds leading trainable sub-groups first, then shares that do not train, as far as it reaches (`sizes`).

Names with leading underscores are DeepSpeed 0.19.8's; `binding` refuses other versions."""

from __future__ import annotations

import logging
from itertools import compress
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from outcore.common.deadline import Deadline
from outcore.common.quantities import format_gib
from outcore.engine.deepspeed.environment import accelerator
from outcore.engine.deepspeed.staged import gradients
from outcore.engine.deepspeed.staged.params import prefetch_by_trace
from outcore.engine.deepspeed.staged.session import StagedSession
from outcore.engine.deepspeed.staged.states import Share, ShareStates, element_offsets, real_numel
from outcore.optim import AdamWHyper, OptimizerPool, state_format
from outcore.optim.formats import PARAM_DTYPES
from outcore.sizing.staged import NORM_NUMEL, frozen_in_ram, leading_in_ram
from outcore.states import RingSize

logger = logging.getLogger(__name__)


class HousedZero3(DeepSpeedZeroOptimizer_Stage3):
    """`session` comes first, the rest is DeepSpeed's call. Gradients and the step are `StagedOptimizer`'s."""

    def __init__(self, session: StagedSession, *args: Any, **kwargs: Any) -> None:
        self.session, self.plan, self.memory = session, session.plan, session.memory
        self._shares: dict[int, Share] = {}
        """Shares by `ds_id` of the parameter."""
        self.pool = OptimizerPool(self.plan.optimizer_threads, backend=self.plan.optimizer_backend)
        super().__init__(*args, **kwargs)
        if session.params is not None:
            prefetch_by_trace(self.parameter_offload.get_param_coordinator(), session.params)

    def _configure_offloading(self, offload_optimizer_config: Any, offload_param_config: Any) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        self.swap_optimizer = False  # states on the drive are ours to move
        self.offload_optimizer_pin_memory = False

    # --- homes of parameters

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        """One home per parameter group: all of its shares, or the leading sub-groups that the RAM for them holds."""
        left_bytes = self.plan.param_ram_bytes if self.session.params is not None else None
        for group in self.trainable_param_groups:
            sub_groups = self._create_fp16_sub_groups(group["params"])
            sizes_bytes = [sum(p.partition_numel() for p in sub) * self.dtype.itemsize for sub in sub_groups]
            home_bytes = sum(sizes_bytes)
            if left_bytes is not None:
                count = leading_in_ram(sizes_bytes, left_bytes)
                home_bytes = sum(sizes_bytes[:count])
                left_bytes = left_bytes - home_bytes if count == len(sizes_bytes) else 0
            home = self.memory.homes.take(home_bytes, "parameters").view(self.dtype)
            self.param_groups_fp16_flat_cpu_memory.append(home)

    def _create_fp16_partitions_with_defragmentation(self, fp16_param_groups: Any) -> None:
        if self.session.params is not None:
            self.session.params.synchronize_writes()  # or leases in the middle of the pool would split the homes' place
        super()._create_fp16_partitions_with_defragmentation(fp16_param_groups)
        if not self.offload_param:
            return
        for sub_group, flat in zip(self.fp16_groups, self.fp16_partitioned_groups_flat, strict=True):
            if flat is None:  # its small shares were never swapped
                for param in sub_group:
                    self._house(param)
        for param in self.module.parameters():
            if not param.requires_grad and hasattr(param, "ds_tensor"):
                self._house(param)  # LoRA's base crosses to the device in every pass
        for param in self._frozen_for_ram():
            self._bring_home(param)

    def _house(self, param: Any) -> None:
        """Give a share that is in memory of DeepSpeed's a home of ours."""
        share = param.ds_tensor
        if share.status != PartitionedParamStatus.AVAILABLE or not share.numel():
            return
        home = self.memory.homes.take(share.nbytes, "parameters").view(share.dtype)
        home.copy_(share.data)
        share.data = home
        share.final_location = "not-nvme"

    def _frozen_for_ram(self) -> list[Any]:
        """Parameters on the drive that do not train and that the RAM for parameters still holds. By sizes with padding,
        so that all ranks decide alike."""
        if self.session.params is None:
            return []
        params = [param for param in self.module.parameters() if hasattr(param, "ds_tensor")]
        sizes_bytes = [param.partition_numel() * self.dtype.itemsize for param in params]
        frozen, frozen_bytes, left_bytes = [], [], self.plan.param_ram_bytes or 0
        for param, n_bytes in zip(params, sizes_bytes, strict=True):
            if not self._is_on_drive(param):
                left_bytes -= n_bytes
            elif not param.requires_grad:
                frozen.append(param)
                frozen_bytes.append(n_bytes)
        return list(compress(frozen, frozen_in_ram(frozen_bytes, left_bytes)))

    def _bring_home(self, param: Any) -> None:
        """Read a share from the drive into a home for good."""
        share = param.ds_tensor
        assert self.session.params is not None and share.status == PartitionedParamStatus.NOT_AVAILABLE
        n_bytes = param.partition_numel() * share.dtype.itemsize
        home = self.memory.homes.take(n_bytes, "parameters", touch=False).view(share.dtype)
        self.session.params.swap_into_buffer(param, home)
        share.data = home
        share.status = PartitionedParamStatus.AVAILABLE
        share.final_location = "not-nvme"

    # --- states and gradients

    def _create_fp32_partitions(self) -> None:
        """No fp32 copies: placeholders, because DeepSpeed counts them."""
        self.fp32_partitioned_groups_flat = [torch.empty(0) for _ in self.fp16_groups]
        for group in self.optimizer.param_groups:
            group["params"] = []

    def initialize_optimizer_states(self) -> None:
        """Do nothing: states are made with the shares, once the gradients have a place."""

    def _setup_for_real_optimizer(self) -> None:
        self._create_fp32_partitions()
        self._create_next_swappable_fp32_groups()
        if self.contiguous_gradients:
            for dtype, bucket in self.ipg_buckets.items():
                device = accelerator().current_device_name()
                bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=device)
        params = [p for group in self.fp16_groups for p in group]
        if self.session.gradients is not None:
            assert self.session.scratch is not None
            self.session.gradients.open(
                self.session.scratch, self._large_shares(params), self.gradient_accumulation_dtype
            )
        in_ram = [p for p in params if not self._has_grad_on_drive(p)]
        total = sum(p.partition_numel() for p in in_ram)
        grads = self.memory.take_gradients(total * self.gradient_accumulation_dtype.itemsize)
        self.grad_partitions_flat_buffer = grads.view(self.gradient_accumulation_dtype)
        places: dict[int, torch.Tensor] = {}
        offset = 0
        for param in in_ram:
            places[param.ds_id] = self.grad_partitions_flat_buffer.narrow(0, offset, param.partition_numel())
            offset += param.partition_numel()
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = places
        self._make_shares(params, places)
        chosen = state_format(self.plan.states)
        chosen.check_param_dtype(self.dtype)
        self.states = ShareStates(
            list(self._shares.values()),
            chosen,
            self.memory.homes,
            self.pool,
            params=self.session.params,
            gradients=self.session.gradients,
            scratch=self.session.scratch,
            state_ram_bytes=self.plan.state_ram_bytes,
            ring=RingSize(self.plan.ring_bytes, self.plan.ring_slots),
        )
        dist.barrier()

    def _make_shares(self, params: list[Any], grads: dict[int, torch.Tensor]) -> None:
        assert self.dtype in PARAM_DTYPES
        rank, world_size = dist.get_rank(), dist.get_world_size()
        offsets = element_offsets([p.partition_numel() for p in params], rank, world_size)
        sub_group_of = {p.ds_id: number for number, group in enumerate(self.fp16_groups) for p in group}
        for index, (param, element_offset) in enumerate(zip(params, offsets, strict=True)):
            padded = param.partition_numel()
            numel = real_numel(param.ds_numel, padded, rank)
            home, on_device = self._home_of(param, numel)
            sub_group = sub_group_of[param.ds_id]
            memory = grads.get(param.ds_id)
            share = Share(
                param, index, sub_group, numel, self.sub_group_to_group_id[sub_group], element_offset,
                self.dtype, None if memory is None else memory[:numel], home, on_device,
            )  # fmt: skip
            if self._is_on_drive(param) and memory is not None and memory.dtype.itemsize == self.dtype.itemsize:
                share.loan = memory.view(self.dtype)
            self._shares[param.ds_id] = share

    def _is_on_drive(self, param: Any) -> bool:
        return self.session.params is not None and self.session.params.store.get(param.ds_id) is not None

    def _large_shares(self, params: list[Any]) -> dict[int, int]:
        """ds_id -> elements of the shares whose gradients are worth a place on the drive. By the size with padding, so
        that all ranks decide alike: a loan on one rank alone would have it gather in another order."""
        itemsize, rank = self.gradient_accumulation_dtype.itemsize, dist.get_rank()
        return {
            p.ds_id: real_numel(p.ds_numel, p.partition_numel(), rank)
            for p in params
            if p.partition_numel() * itemsize >= gradients.MIN_BYTES
        }

    def _has_grad_on_drive(self, param: Any) -> bool:
        return self.session.gradients is not None and self.session.gradients.holds(param.ds_id)

    def _home_of(self, param: Any, numel: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(in RAM, on the device) of a share's `numel` elements; (None, None) when it lives on the drive."""
        if param.ds_tensor.status != PartitionedParamStatus.AVAILABLE:
            return None, None
        share = param.ds_tensor.data.view(-1)
        share[numel:].zero_()
        if share.device.type == "cpu":
            return share[:numel], None
        home = self.memory.homes.take(numel * share.dtype.itemsize, "parameters").view(share.dtype)
        home.copy_(share[:numel])
        return home, share[:numel]

    def share_of(self, param: Any) -> Share:
        """This rank's share of a trainable parameter."""
        return self._shares[param.ds_id]

    # --- facts and the end

    def words(self) -> str:
        """Text for people: where everything lives."""
        numel = sum(share.numel for share in self._shares.values())
        on_drive = sum(share.numel for share in self._shares.values() if share.home is None)
        lines = (
            f"outcore's own optimizer step for {numel / 1e6:.1f} M parameters on this rank, states {self.plan.states}"
        )
        if self.states.nvme_bytes or on_drive:
            share = 100 * self.states.nvme_bytes / self.states.total_bytes
            lines += (
                f", {format_gib(self.states.nvme_bytes)} of them ({share:.0f} %) and {on_drive / 1e6:.1f} M parameters "
                f"on NVMe ({self.plan.nvme_path})"
            )
            ring = self.states.ring
            if ring is not None and ring.kept_bytes:
                lines += f", a ring of {format_gib(ring.num_slots * ring.slot_bytes)} in RAM through which they pass "
                lines += f"keeps {format_gib(ring.kept_bytes)} of states from one update to the next"
        else:
            lines += " in RAM"
        if self.session.gradients is not None:
            lines += f"; {format_gib(self.session.gradients.nvme_bytes)} of gradients on NVMe"
        return f"{lines}; {self.memory.words()}; {self.pool.num_threads} threads ({self.pool.backend.name})"

    def destroy(self) -> None:
        """DeepSpeed's hooks first, then threads and memory. Nothing of the model may be used any more."""
        super().destroy()
        deadline = Deadline()
        idle = self.states.close(deadline)
        try:
            self.pool.close(deadline.left_s(), cancel=True)
        except TimeoutError as error:
            logger.error("while the engine was closed: %s", error)
            idle = False
            deadline.expire()
        self.session.close(deadline, is_idle=idle)


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
        """Read what was updated on the drive into the memory of its gradient, on every rank alike."""
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
