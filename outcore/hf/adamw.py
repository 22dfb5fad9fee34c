"""AdamW on the CPU for streamed models, as a `torch.optim.Optimizer`: exact masters and moments in RAM.

For full training in 16 bits: torch's AdamW would keep 16-bit moments and no masters. States are those of
`outcore.optim` (fp32, or moments of 8 bits), the norm that clips is exact, and what is saved are fp32 tensors by name,
so that a resumed run goes on bit for bit. Parameters on the GPU (embedding, head) are updated in RAM as well."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from outcore.common.quantities import round_up
from outcore.hf.homes import LastingMemory
from outcore.optim import (
    BLOCK_NUMEL,
    STATE_NAMES,
    AdamWHyper,
    ChunkJob,
    ChunkState,
    JobBatch,
    OptimizerPool,
    state_format,
)
from outcore.sizing.streaming import CHUNK_NUMEL


class RamGradient(torch.Tensor):
    """A gradient in RAM whose norm a trainer may ask for, and which it may multiply by one, at no cost of a pass over
    it on one thread: transformers' Trainer does both in every step, also where its clipping is off.

    The Euclidean norm comes from the optimizer, which sums up all gradients at once on all threads; one times the
    values is the values. Everything else is torch's."""

    optimizer: weakref.ref[StreamedAdamW]
    known: tuple[int, float]
    """(version of the values, sum of their squares)"""

    @classmethod
    def of(cls, values: torch.Tensor, optimizer: weakref.ref[StreamedAdamW]) -> RamGradient:
        made = torch.Tensor._make_subclass(cls, values)
        made.optimizer, made.known = optimizer, (-1, 0.0)
        return made

    @property
    def is_summed(self) -> bool:
        """Whether the sum of squares is that of the present values."""
        return self.known[0] == self._version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[0] if args and isinstance(args[0], cls) else None
        if given is not None and func in _PAST_VERSIONS:
            given.known = -1, 0.0
        elif given is not None and func is torch.Tensor.__deepcopy__:
            return given.as_subclass(torch.Tensor).clone()
        elif given is not None and not kwargs:
            if func is torch.linalg.vector_norm and args[1:] in ((), (2,)) and (optimizer := given.optimizer()):
                return torch.tensor(optimizer.sumsq_of(given) ** 0.5, dtype=given.dtype)
            if func is torch.Tensor.mul_ and _is_one(*args[1:]):
                return given
            if func in _AS_PLAIN:
                return func(given.as_subclass(torch.Tensor), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_AS_PLAIN = (torch.Tensor.__reduce_ex__, torch.Tensor.__repr__)
"""Operations on the values alone: a pickle of a gradient knows no optimizer."""
_PAST_VERSIONS = (
    torch.Tensor.data.__get__, torch.Tensor.data.__set__,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.untyped_storage, torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
)  # fmt: skip
"""Ways to change values that leave the tensor's version as it is."""


def _is_one(factor: Any) -> bool:
    return isinstance(factor, torch.Tensor) and factor.ndim == 0 and factor.device.type == "cpu" and factor.item() == 1


class StreamedAdamW(torch.optim.Optimizer):
    """AdamW whose states live in RAM; made by `optimizer`."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], states: str, max_grad_norm: float | None
    ) -> None:
        super().__init__(params, defaults)
        self._format, self._max_grad_norm = state_format(states), max_grad_norm
        self._pool = OptimizerPool()
        sizes = [round_up(p.numel(), BLOCK_NUMEL) for group in self.param_groups for p in group["params"]]
        starts = itertools.accumulate(sizes, initial=0)
        self._places = dict(zip((p for group in self.param_groups for p in group["params"]), starts, strict=False))
        """The key of stochastic rounding."""
        self._buffers: dict[nn.Parameter, list[torch.Tensor]] = {}
        self._in_ram: dict[nn.Parameter, torch.Tensor] = {}
        """Copies of parameters on the device, and of those that are not contiguous, 1-D."""
        self._grads_in_ram: dict[nn.Parameter, torch.Tensor] = {}
        self._versions: dict[nn.Parameter, int] = {}
        self.grad_norm: float | None = None
        """The last step's, before clipping; None without clipping."""
        own: weakref.ref[StreamedAdamW] = weakref.ref(self)
        for p in self._places:
            if p.device.type == "cpu":
                p.register_post_accumulate_grad_hook(partial(_wrap_gradient, own))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chosen = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        grads = {p: self._here(self._grads_in_ram, p, p.grad) for _, p in chosen}
        scale = self._scale(grads)
        tickets = []
        for number, (group, p) in enumerate(chosen):
            state = self._state_of(p)
            state["step"] += 1
            beta1, beta2 = group["betas"]
            hyper = AdamWHyper(
                float(group["lr"]), state["step"], beta1, beta2, group["eps"], group["weight_decay"], scale
            )
            param, grad, jobs = self._values(p), grads[p], []
            for at, buffer in enumerate(self._buffers[p]):
                cut = slice(at * CHUNK_NUMEL, (at + 1) * CHUNK_NUMEL)
                jobs.append(ChunkJob(grad[cut], buffer, param[cut], self._places[p] + cut.start))
            tickets.append((p, self._pool.submit(number, number, JobBatch(self._format, jobs), hyper)))
        for p, ticket in tickets:
            self._pool.wait(ticket)
            if p in self._in_ram:
                p.copy_(self._in_ram[p].view(p.shape))
            self._versions[p] = p._version
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Masters and moments in fp32, step and group settings, by the parameters' numbers as torch counts them."""
        groups, at, saved = [], 0, {}
        for group in self.param_groups:
            numbers = list(range(at, at + len(group["params"])))
            at += len(numbers)
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": numbers})
            for number, p in zip(numbers, group["params"], strict=True):
                if p in self._buffers:
                    chunks = self._chunks(p)
                    values = {name: torch.cat([chunk.read(name) for chunk in chunks]) for name in STATE_NAMES}
                    saved[number] = {"step": self.state[p]["step"], **values}
        return {"state": saved, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, of any of the formats. ValueError where the parameters are others."""
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        if theirs != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"these optimizer states are of groups of {theirs} parameters, this optimizer's are others"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, saved in state_dict["state"].items():
            p = parameters[number]
            state = self._state_of(p)
            state["step"] = int(saved["step"])
            for at, chunk in enumerate(self._chunks(p)):
                for name in STATE_NAMES:
                    values = saved[name].reshape(-1)[at * CHUNK_NUMEL : (at + 1) * CHUNK_NUMEL]
                    chunk.write(name, values.to("cpu", torch.float32))
            if p in self._in_ram:
                p.copy_(self._in_ram[p].view(p.shape))
            self._versions[p] = p._version

    def sumsq_of(self, wanted: RamGradient) -> float:
        """Sum of squares of a gradient; with it those of all whose values have changed since they were summed."""
        if not wanted.is_summed:
            held = [wanted, *(p.grad for p in self._places if p.grad is not wanted)]  # perhaps let go of by all others
            grads = [grad for grad in held if isinstance(grad, RamGradient) and not grad.is_summed]
            found = self._sums([grad.detach().reshape(-1) for grad in grads])
            for grad, sumsq in zip(grads, found, strict=True):
                grad.known = grad._version, sumsq
        return wanted.known[1]

    def _sums(self, grads: list[torch.Tensor]) -> list[float]:
        """Sums of squares, of tensors in RAM, 1-D."""
        tickets = [self._pool.submit_sumsq(number, number, [grad]) for number, grad in enumerate(grads)]
        found = [self._pool.wait(ticket).stats for ticket in tickets]
        return [stats.sumsq for stats in found if stats is not None]

    def _scale(self, grads: dict[nn.Parameter, torch.Tensor]) -> float:
        """Compute the factor by which clipping multiplies the gradients."""
        if self._max_grad_norm is None or not grads:
            return 1.0
        known = [self.sumsq_of(p.grad) for p in grads if isinstance(p.grad, RamGradient)]
        others = self._sums([values for p, values in grads.items() if not isinstance(p.grad, RamGradient)])
        self.grad_norm = norm = sum(known + others) ** 0.5
        if not norm < float("inf"):
            raise RuntimeError(
                "a gradient is not finite, so there is no norm to clip by; nothing was updated. Lower the learning "
                "rate, or look at the data of this step"
            )
        return min(1.0, self._max_grad_norm / norm) if norm > 0 else 1.0

    def _state_of(self, p: nn.Parameter) -> dict[str, Any]:
        """Step and place of a parameter; its masters anew where somebody else has changed it."""
        state = self.state[p]
        if p not in self._buffers:
            state["step"] = 0
            sizes = [len(part) for part in self._values(p).split(CHUNK_NUMEL)]
            self._buffers[p] = [torch.zeros(self._format.chunk_bytes(n), dtype=torch.uint8) for n in sizes]
            for chunk in self._chunks(p):
                chunk.initialise()
        elif self._versions.get(p, p._version) != p._version:
            self._in_ram.pop(p, None)
            values = self._values(p).float()
            for chunk, part in zip(self._chunks(p), values.split(CHUNK_NUMEL), strict=True):
                chunk.write("master", part)
        return state

    def _values(self, p: nn.Parameter) -> torch.Tensor:
        """The parameter in RAM, 1-D; of one on the device a copy."""
        if p.device.type == "cpu" and p.is_contiguous():
            return p.detach().view(-1)
        if p not in self._in_ram:
            self._in_ram[p] = self._here(self._in_ram, p, p)
        return self._in_ram[p]

    @staticmethod
    def _here(copies: dict[nn.Parameter, torch.Tensor], p: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Values in RAM, 1-D: those of the device in a copy of `p`, pinned, because copies to other RAM are slow."""
        flat = values.detach().reshape(-1)
        if flat.device.type == "cpu":
            return flat
        if p not in copies:
            copies[p] = LastingMemory(flat.device).take(flat.nbytes, "the optimizer").view(flat.dtype)
        return copies[p].copy_(flat)

    def _chunks(self, p: nn.Parameter) -> list[ChunkState]:
        parts = self._values(p).split(CHUNK_NUMEL)
        return [ChunkState(self._format, buffer, len(part), part) for part, buffer in zip(parts, self._buffers[p])]


def _wrap_gradient(optimizer: weakref.ref[StreamedAdamW], p: nn.Parameter) -> None:
    if p.grad is not None and not isinstance(p.grad, RamGradient) and not (p.grad.is_sparse or p.grad.requires_grad):
        p.grad = RamGradient.of(p.grad, optimizer)


def optimizer(
    model: nn.Module,
    lr: float = 1e-5,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    states: str = "fp32",
) -> StreamedAdamW:
    """Make an AdamW for what is trained of a model: masters and moments in RAM, updates on the CPU.

    Matrices decay, norms and biases do not. `max_grad_norm`: clip by the exact norm of all gradients; the trainer's own
    clipping is then to be off (its max_grad_norm 0). `states`: fp32, or fp32_m8 with moments of 8 bits. Give it to a
    trainer as `optimizers=(optimizer(model), None)`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("nothing of this model is trained: no parameter requires a gradient")
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return StreamedAdamW([group for group in groups if group["params"]], defaults, states, max_grad_norm)
