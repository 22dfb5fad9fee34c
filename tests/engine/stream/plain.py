"""What the streaming engine is measured against: plain PyTorch over the whole model, and random batches for both."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.state import seed_of

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BatchShape:
    """One micro-batch to be: `kind` plain, padded, packed, sparse (one target in all), or masked (no target at all)."""

    kind: str
    rows: int
    length: int
    seed: int

    def make(self, vocab_size: int) -> Batch:
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(2, vocab_size, (self.rows, self.length), generator=generator)
        labels = ids.clone()
        batch = {"input_ids": ids, "labels": labels}
        cut = int(torch.randint(1, self.length + 1, (), generator=generator))
        if self.kind == "padded":
            mask = torch.ones_like(ids)
            mask[0, cut:] = 0
            labels[0, cut:] = -100
            batch["attention_mask"] = mask
        elif self.kind == "packed":
            places = torch.cat([torch.arange(cut), torch.arange(self.length - cut)])
            labels[:, cut : cut + 1] = -100
            batch["position_ids"] = places.expand(self.rows, -1).contiguous()
        elif self.kind == "sparse":
            labels[:] = -100
            labels[-1, -1] = ids[-1, -1]
        elif self.kind == "masked":
            labels[:] = -100
        return batch


KINDS = ("plain", "padded", "packed", "sparse", "masked")


def batch_shapes(max_rows: int = 3, max_length: int = 20) -> st.SearchStrategy[BatchShape]:
    return st.builds(
        BatchShape, kind=st.sampled_from(KINDS), rows=st.integers(1, max_rows), length=st.integers(1, max_length),
        seed=st.integers(0, 999),
    )  # fmt: skip


def num_targets(batches: Sequence[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def global_batches(num_steps: int = 2) -> st.SearchStrategy[list[list[BatchShape]]]:
    """For each step the ragged micro-batches of its global batch; some token counts in each."""
    some_target = BatchShape("plain", 1, 9, 7)
    step = st.lists(batch_shapes(), min_size=1, max_size=4).map(
        lambda shapes: shapes if num_targets([s.make(50) for s in shapes]) else [*shapes, some_target]
    )
    return st.lists(step, min_size=num_steps, max_size=num_steps)


@dataclass
class PlainTraining:
    """AdamW on fp32 masters over the whole model by autograd, as mixed precision is written by hand.

    Gradients of micro-batches are added up in fp32 and rounded once to the weights' type, which is how they reach the
    engine's optimizer. `seeds`: (run seed, step) -> dropout draws what the engine promises to draw: every part of the
    model on every micro-batch by a seed of its own.
    """

    loaded: object
    settings: StreamSettings
    loss_scale: float = 1.0
    dropout: bool = False
    steps: int = 0
    masters: dict[str, torch.nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.loaded.model
        self.weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.masters = {n: torch.nn.Parameter(p.detach().float().clone()) for n, p in self.weights.items()}
        s = self.settings
        self.optimizer = torch.optim.AdamW(
            self.masters.values(), betas=s.betas, eps=s.eps, weight_decay=s.weight_decay, foreach=False
        )

    def step(self, batches: Sequence[Batch], lr: float) -> tuple[float, float]:
        """(mean loss, global norm before clipping)."""
        self.steps += 1
        loss, total = self.loaded.token_loss(), num_targets(batches)
        sums = {n: torch.zeros_like(m) for n, m in self.masters.items()}
        summed = 0.0
        for index, batch in enumerate(batches):
            self.model.zero_grad(set_to_none=True)
            with reseeding(self.model, self.settings.seed, self.steps, index, self.dropout):
                result = loss(self.model, batch)
            summed += float(result.loss_sum.detach())
            (result.objective(total) * self.loss_scale).backward()
            for name, p in self.weights.items():
                if p.grad is not None:
                    sums[name] += p.grad.float()
        for name, master in self.masters.items():
            master.grad = sums[name].to(self.weights[name].dtype).float() / self.loss_scale
        limit = self.settings.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters.values(), limit))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.weights.items():
                p.copy_(self.masters[name])
        return summed / total, norm

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Family -> tensors by name, as checkpoints call them."""
        moments = {
            family: {n: self.optimizer.state[m][family] for n, m in self.masters.items()}
            for family in ("exp_avg", "exp_avg_sq")
        }
        return {"master": {n: m.detach() for n, m in self.masters.items()}, **moments}


@contextmanager
def reseeding(model: torch.nn.Module, seed: int, step: int, micro_batch: int, enabled: bool):
    """Inside, the generator starts anew at the embedding and at each layer of a GPT-2, by the engine's rule."""
    with ExitStack() as stack:
        if enabled:

            def at(unit: int) -> Callable[..., None]:
                return lambda *_: torch.default_generator.manual_seed(seed_of(seed, step, micro_batch, unit)) and None

            for index, layer in enumerate(model.transformer.h):
                stack.callback(layer.register_forward_pre_hook(at(index + 1)).remove)
            at(0)()
        yield
