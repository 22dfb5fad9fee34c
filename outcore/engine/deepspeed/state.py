"""Reading and writing DeepSpeed's partitioned states by parameter name, whatever the ZeRO stage.

Every stage keeps the fp32 master weights and Adam's two moments in flat buffers of its own making. `StateAccess`
hides which: `get` gathers one parameter's full tensor on every rank, `set` gives each rank its share of one. All
ranks call together. Cost: one parameter at a time, so memory never holds more than the largest tensor.

Tested with DeepSpeed 0.19.8 (ZeRO stages 0-3, bf16, fp16 and fp32, optimizer on the device or in RAM)."""

from __future__ import annotations

from typing import Any

import torch

from outcore.engine.base import EngineError

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
FAMILIES = (MASTER, *MOMENTS)
"""Names of the fp32 tensors per parameter, and of their shard files."""


class StateAccess:
    """fp32 states of a DeepSpeed engine's trainable parameters."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.inner = getattr(self.optimizer, "optimizer", self.optimizer)

    def prepare(self, step: int) -> None:
        """Create the moments, as zeros, where no step has made them yet; `step` updates are on the clock."""
        for fp32 in self._flat_fp32():
            state = self.inner.state[fp32]
            for key in MOMENTS:
                if key not in state:
                    state[key] = torch.zeros_like(fp32, memory_format=torch.preserve_format)
            state["step"] = self._step_value(fp32, step)
        self._replay_cpu_adam(step)

    def _replay_cpu_adam(self, step: int) -> None:
        """Bring DeepSpeedCPUAdam's hidden powers of beta to where `step` updates leave them.

        Its C++ object keeps beta**step as a running fp32 product (and as pow() when several flat buffers share a step,
        csrc/includes/cpu_adam.h, IncrementStep), which a resumed process would not have: the same calls are made again
        on a buffer of one element. With several buffers only the last step matters."""
        if type(self.inner).__name__ != "DeepSpeedCPUAdam":
            return
        group = self.inner.param_groups[0]
        buffers = len(self._flat_fp32())
        dummy = [torch.zeros(1) for _ in range(4)]
        for past in range(1 if buffers == 1 else max(1, step - 1), step + 1):
            for _ in range(buffers):
                self.inner.ds_opt_adam.adam_update(
                    self.inner.opt_id, past, 0.0, *group["betas"], group["eps"], 0.0, True, *dummy
                )

    def _step_value(self, fp32: torch.Tensor, step: int) -> Any:
        """The step counter in the type the optimizer keeps: DeepSpeedCPUAdam an int, torch's AdamW a tensor."""
        if type(self.inner).__module__.startswith("torch."):
            group = self.inner.param_groups[0]
            on_device = group.get("fused") or group.get("capturable")
            return torch.tensor(float(step), dtype=torch.float32, device=fp32.device if on_device else "cpu")
        return step

    def _flat_fp32(self) -> list[torch.Tensor]:
        raise EngineError(f"{type(self.optimizer).__name__}: not an optimizer this program knows.")

    def get(self, param: torch.nn.Parameter, family: str) -> torch.Tensor:
        """The full fp32 tensor of one parameter, on every rank (`family`: master, exp_avg or exp_avg_sq)."""
        raise EngineError(f"{type(self.optimizer).__name__}: not an optimizer this program knows.")

    def set(self, param: torch.nn.Parameter, family: str, value: torch.Tensor) -> None:
        """Store the full fp32 tensor of one parameter, given on every rank."""
        raise EngineError(f"{type(self.optimizer).__name__}: not an optimizer this program knows.")

    def get_weight(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The 16-bit (or fp32) weight itself, whole, on every rank."""
        return param.detach()

    def set_weight(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite the weight that the forward pass uses."""
        with torch.no_grad():
            param.copy_(value)

    # --- a checkpoint's tensors, one parameter after another

    def begin_restore(self) -> None:
        """Before the first `restore`."""

    def restore(self, param: torch.nn.Parameter, weight: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        """Set a parameter and its states (by family) from whole tensors on the CPU, given on every rank."""
        value = weight if weight.dtype == param.dtype else states[MASTER].to(param.dtype)
        self.set_weight(param, value.to(self.engine.device))
        for family, state in states.items():
            self.set(param, family, state.to(self.engine.device))

    def end_restore(self) -> None:
        """After the last one."""

    # --- dynamic loss scale (fp16)

    _SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def _scaler(self) -> Any:
        for holder in (
            getattr(self.optimizer, "loss_scaler", None),
            getattr(self.optimizer, "loss_scale_config", None),
        ):
            if hasattr(holder, "cur_scale"):
                return holder
        return None

    def scaler_state(self) -> dict[str, float]:
        """The loss scaler's numbers; empty without one."""
        scaler = self._scaler()
        return {name: getattr(scaler, name) for name in self._SCALER_FIELDS if hasattr(scaler, name)}

    def set_scaler_state(self, state: dict[str, float]) -> None:
        """Restore what `scaler_state` returned."""
        scaler = self._scaler()
        for name, value in state.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)


class Stage3State(StateAccess):
    """ZeRO-3: flat fp32 sub-groups; weights partitioned."""

    def _flat_fp32(self) -> list[torch.Tensor]:
        return [t for t in self.optimizer.fp32_partitioned_groups_flat if t is not None and t.numel()]

    def get(self, param: torch.nn.Parameter, family: str) -> torch.Tensor:
        return self.optimizer.get_full_hp_param(param, None if family == MASTER else family)

    def set(self, param: torch.nn.Parameter, family: str, value: torch.Tensor) -> None:
        padded = value.flatten()
        group, offset, numel = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
        del group, offset
        missing = numel * self.engine.world_size - padded.numel()
        if missing > 0:  # the last rank's share is padded
            padded = torch.nn.functional.pad(padded, (0, missing))
        rank = torch.distributed.get_rank() if self.engine.world_size > 1 else 0
        share = padded.narrow(0, numel * rank, numel)
        self.optimizer.set_local_hp_param(share, param, None if family == MASTER else family)

    def get_weight(self, param: torch.nn.Parameter) -> torch.Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([param]):
            return param.detach().clone()

    def set_weight(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            param.copy_(value)


class Stage12State(StateAccess):
    """ZeRO-1 and ZeRO-2: one flat fp32 partition per parameter group; weights whole on every rank."""

    def _flat_fp32(self) -> list[torch.Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def prepare(self, step: int) -> None:
        super().prepare(step)
        self.optimizer._link_all_hp_params()
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()

    def get(self, param: Any, family: str) -> torch.Tensor:
        self.optimizer._lazy_init_hp_params_optimizer_state()
        return param.get_full_hp_param(None if family == MASTER else family)

    def set(self, param: Any, family: str, value: torch.Tensor) -> None:
        param.set_full_hp_param(value.to(torch.float32), None if family == MASTER else family)


class WholeState(StateAccess):
    """Stage none: one fp32 copy per parameter (16-bit training), or the parameter itself (fp32 training)."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._fp32_of: dict[int, torch.Tensor] = {}
        if hasattr(self.optimizer, "fp16_groups") and hasattr(self.optimizer, "fp32_groups"):
            for low, high in zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True):
                self._fp32_of.update({id(p): q for p, q in zip(low, high, strict=True)})
        elif isinstance(self.optimizer, torch.optim.Optimizer):
            self._fp32_of = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        else:
            raise EngineError(f"{type(self.optimizer).__name__}: not an optimizer this program knows.")

    def _flat_fp32(self) -> list[torch.Tensor]:
        return list(self._fp32_of.values())

    def get(self, param: torch.nn.Parameter, family: str) -> torch.Tensor:
        fp32 = self._fp32_of[id(param)]
        return (fp32 if family == MASTER else self.inner.state[fp32][family]).detach()

    def set(self, param: torch.nn.Parameter, family: str, value: torch.Tensor) -> None:
        fp32 = self._fp32_of[id(param)]
        with torch.no_grad():
            (fp32 if family == MASTER else self.inner.state[fp32][family]).copy_(value)


class StagedState(Stage3State):
    """Access to the staged optimizer's states: shares are read and written directly, no flat fp32 buffers between.

    Several ranks: a full tensor is gathered from the ranks' shares, one parameter at a time, so any number of ranks can
    resume. Writing the master writes the 16-bit parameter as well (its rounding), whatever the format of the states."""

    def prepare(self, step: int) -> None:
        """`step` updates are on the clock; the states exist from the start."""
        self.optimizer.updates = step

    def get(self, param: Any, family: str) -> torch.Tensor:
        share = self.optimizer.share_of(param)
        self.optimizer.settle()
        value = self.optimizer.states.read(share, family)
        shape = torch.Size(param.ds_shape)
        if self.engine.world_size == 1:
            return value.view(shape)
        padded = torch.zeros(param.partition_numel(), dtype=torch.float32, device=self.engine.device)
        padded[: share.numel] = value
        whole = torch.empty(padded.numel() * self.engine.world_size, dtype=torch.float32, device=padded.device)
        torch.distributed.all_gather_into_tensor(whole, padded)
        return whole[: shape.numel()].view(shape)

    def begin_restore(self) -> None:
        """Parameters that are whole on the device let go of their old values."""
        self.optimizer.begin_restore()

    def restore(self, param: Any, weight: torch.Tensor, states: dict[str, torch.Tensor]) -> None:
        """Set this rank's share; `weight` is not needed, it is the master rounded."""
        share = self.optimizer.share_of(param)
        start = torch.distributed.get_rank() * param.partition_numel()
        part = {f: states[f].reshape(-1)[start : start + share.numel].to(torch.float32) for f in FAMILIES}
        self.optimizer.states.write(share, part)

    def end_restore(self) -> None:
        self.optimizer.publish()


def open_state(engine: Any) -> StateAccess:
    """The access that fits a DeepSpeed engine's optimizer; EngineError for one this program does not know."""
    if hasattr(engine.optimizer, "share_of"):
        return StagedState(engine)
    kind = type(engine.optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return Stage3State(engine)
    if kind == "DeepSpeedZeroOptimizer":
        return Stage12State(engine)
    return WholeState(engine)
