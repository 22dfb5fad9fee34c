"""One visit of a layer: forward without a graph, backward with the layer computed again.

Autograd sees two nodes a layer. `_Layer` takes the tensors that the layer was called with and gives what it returned;
its backward brings the weights once more, computes the layer again and differentiates it, some rows after others where
a whole batch does not fit, so that the weights cross once. `_Weights` takes the layer's trained parameters and gives a
token that `_Layer` wants: its backward follows that of the layer, on the CPU's thread, and waits for gradients on their
way to RAM while the GPU's thread goes on with the layer below. Both are nodes like any other: gradients of several uses
are added up, hooks run and `torch.autograd.grad` works as in the plain model.

Dropout draws in the second computation what it drew in the first. What transformers records inside of a layer (a
router's logits), and what a layer writes into a mapping for others to read (shared keys), are outputs of the node like
the rest."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from outcore.flow.parts import bound
from outcore.hf.compiled import CompiledForwards, compiled_forward
from outcore.hf.kept import HiddenHome, Shipment
from outcore.hf.rows import WHOLE, Grads, add, rows_of
from outcore.hf.stack import DOWN, UP, LayerStack, Weight


def refuse_scaled_gradients(device: torch.device, is_autocast: bool, dtype: torch.dtype) -> None:
    """RuntimeError for mixed precision in fp16 on a GPU: torch's GradScaler reads its factor for gradients in RAM
    before the copy of it has arrived, so that steps would be wrong without a word."""
    if device.type == "cuda" and is_autocast and dtype == torch.float16:
        raise RuntimeError(
            "fp16 mixed precision scales gradients on the GPU, and those of streamed layers are in RAM: steps would go "
            "wrong. Train in bf16 (bf16=True), or in fp32."
        )


class LayerVisit:
    """A call of one layer, from its forward to its backward."""

    def __init__(
        self, stack: LayerStack, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """`run`: the forward of the layer's class."""
        self.stack, self.index, self._run = stack, index, run
        self._names, self._num_args = list(kwargs), len(args)
        values = (*args, *kwargs.values())
        self._ledgers = {at: value for at, value in enumerate(values) if isinstance(value, MutableMapping)}
        """Mappings by place in the call: layers write there for others to read."""
        contents = tuple(tuple(ledger.items()) for ledger in self._ledgers.values())
        self.leaves: list[Any]
        self.leaves, self._form = tree_flatten((values, contents), is_leaf=_is_whole)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self._given = [at for at, leaf in enumerate(self.leaves) if _is_float(leaf) and leaf.requires_grad]
        """Places of what wants a gradient among the leaves."""
        self._kept = list(self._given)
        """Places of what the backward needs anew; the first float tensor, the hidden states, among them."""
        hidden_at = next((at for at, leaf in enumerate(self.leaves) if _is_float(leaf)), None)
        if hidden_at is not None and hidden_at not in self._kept:
            self._kept.insert(0, hidden_at)
        self._trained = [p for p in self.layer.parameters() if p.requires_grad]
        has_cache = any(isinstance(leaf, Cache) for leaf in self.leaves)
        self._rows = WHOLE if has_cache else rows_of(self.layer, tensors, stack.room_bytes)
        self._recorded = _recorded_keys()
        self._is_plain = not (has_cache or self._ledgers or self._recorded)
        """Whether nothing but tensors comes out of the layer."""
        self._is_differentiated = False
        self._home: HiddenHome | None = None
        self._below: weakref.ref[LayerVisit] | None = None
        self.shipped = Shipment(self.stack.streaming.ground, f"{stack.path}.{index}", self._trained)
        """Gradients of the trained parameters on their way to RAM."""

    @property
    def layer(self) -> torch.nn.Module:
        return self.stack.layers[self.index]

    def output(self) -> Any:
        """Compute what the layer returns; differentiable where anything of it is."""
        if not (torch.is_grad_enabled() and (self._given or self._trained)):
            with self.stack.visit(self.index, UP) as weights:
                return self._returned(self._joined(self._compute_all(self.leaves, weights)))
        self._is_differentiated = True
        _refuse_what_has_no_gradient(self)
        device = self.stack.streaming.device
        self._amp = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        refuse_scaled_gradients(device, *self._amp)
        self._random = _random_state(device) if self.layer.training else None
        self._below, self.stack.last_visit = self.stack.last_visit, weakref.ref(self)
        token = _Weights.apply(self, *self._trained) if self._trained else _token()
        outputs = _Layer.apply(self, token, *(self.leaves[at] for at in self._given))
        for at in self._kept:
            self.leaves[at] = None  # autograd has them, or RAM
        if self.index == len(self.stack.layers) - 1:
            self.stack.expect(self.index, DOWN)
        result = self._returned(outputs)
        for at, ledger in self._ledgers.items():  # now its outputs lead back to this visit: a circle for ever
            self.leaves = [None if leaf is ledger else leaf for leaf in self.leaves]
            self._ledgers[at] = _emptied(ledger)
        return result

    # ------------------------------------------------------------------ called by the nodes

    def forward(self, given: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """(what the layer returns, what is to be saved for its backward)."""
        leaves = list(self.leaves)
        for at, tensor in zip(self._given, given, strict=True):
            leaves[at] = tensor.detach()
        kept = [leaves[at] for at in self._kept]
        versions = [tensor._version for tensor in kept]
        with self.stack.visit(self.index, UP) as weights:
            outputs = self._joined(self._compute_all(leaves, weights))
        if versions != [tensor._version for tensor in kept]:
            raise RuntimeError(
                f"{self.stack.path}.{self.index} changes its input in place and so cannot be computed again: this "
                "model cannot be streamed in training"
            )
        if kept and self.stack.sends_away(kept[0].nbytes, self.index):
            self._home = HiddenHome(kept.pop(0), self.stack.streaming.ground)
        return tuple(outputs), kept

    def backward(self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> Grads:
        """Gradients of the tensors that want one; those of the trained parameters are on their way to RAM."""
        values = list(saved) if self._home is None else [self._home.take(), *saved]
        kept = dict(zip(self._kept, values, strict=True))
        below = None if self._below is None else self._below()
        if below is not None and below._home is not None:
            below._home.fetch()
        starts = [0] * len(grads)
        of_given: list[Grads] = [[] for _ in self._given]
        of_trained: Grads = [None] * len(self._trained)
        with (
            self.stack.visit(self.index, DOWN) as weights,
            _same_random_numbers(self.stack.streaming.device, self._random),
        ):
            weights, wanted = _trainable(weights, self._trained)
            with _standing_in(weights):
                for cut in self._rows.cuts:
                    found = self._differentiated(kept, cut, grads, starts, wanted)
                    for parts, gradient in zip(of_given, found, strict=False):
                        parts.append(gradient)
                    of_trained = list(map(add, of_trained, found[len(self._given) :]))
        self.shipped.send(of_trained)
        return [self._rows.joined(kept[at], parts) for at, parts in zip(self._given, of_given, strict=True)]

    def _differentiated(
        self,
        kept: dict[int, torch.Tensor],
        cut: slice,
        grads: Sequence[torch.Tensor | None],
        starts: list[int],
        wanted: list[torch.Tensor],
    ) -> Grads:
        """Compute some rows again, and their gradients of what wants one, then of `wanted`; nothing where none of it
        has any. `starts` counts on."""
        x, before = self._fresh(kept, cut), list(starts)
        again = [x.get(at, leaf) for at, leaf in enumerate(self.leaves)]
        try:
            with torch.enable_grad(), self._same_autocast():
                outputs, *_ = self._compute(again, cut)
            of_these = self._rows.grads_of(grads, outputs, starts)
            pairs = [(y, dy) for y, dy in zip(outputs, of_these, strict=True) if dy is not None and y.requires_grad]
            if not pairs:
                return []
            ys, dys = zip(*pairs, strict=True)
            return list(torch.autograd.grad(ys, [*(x[at] for at in self._given), *wanted], dys, allow_unused=True))
        except Exception as error:
            if (compiled := self._compiled) is None:
                raise
            compiled.failed(error)
        starts[:] = before
        return self._differentiated(kept, cut, grads, starts, wanted)

    # ------------------------------------------------------------------ computing

    @property
    def _compiled(self) -> CompiledForwards | None:
        """Compiler of the layer; None where it runs eagerly."""
        compiled = self.stack.compiled if self._is_plain else None
        return compiled if compiled is not None and compiled.suits(self.layer) else None

    def _compute_all(
        self, leaves: Sequence[Any], weights: list[Weight]
    ) -> list[tuple[list[torch.Tensor], list[Any], TreeSpec]]:
        """`_compute` for all cuts. Compiled, it is the code of the backward's second computation, where there will be
        one: with a graph that nobody uses, and which one layer has room for, as then. Eagerly if it draws random
        numbers."""
        cuts = self._rows.cuts
        if (compiled := self._compiled) is not None:
            device = self.stack.streaming.device
            before = _random_state(device)
            try:
                found = self._compute_as_again(leaves, weights) if self._is_differentiated else None
                if found is None:
                    with _standing_in(weights):
                        found = [self._compute(leaves, cut) for cut in cuts]
            except Exception as error:
                compiled.failed(error)
            else:
                if all(map(torch.equal, before, _random_state(device))):
                    return found
                compiled.give_up("they draw random numbers (dropout), which compiled code would draw otherwise again")
            _set_random_state(device, before)
        with _standing_in(weights):
            return [self._compute(leaves, cut) for cut in cuts]

    def _compute_as_again(
        self, leaves: Sequence[Any], weights: list[Weight]
    ) -> list[tuple[list[torch.Tensor], list[Any], TreeSpec]]:
        found = []
        kept = {at: leaves[at] for at in self._kept}
        with _standing_in(_trainable(weights, self._trained)[0]), torch.enable_grad(), self._same_autocast():
            for cut in self._rows.cuts:
                x = self._fresh(kept, cut)
                tensors, *form = self._compute([x.get(at, leaf) for at, leaf in enumerate(leaves)], cut)
                found.append(([tensor.detach() for tensor in tensors], *form))
        return found

    def _fresh(self, kept: dict[int, torch.Tensor], cut: slice) -> dict[int, torch.Tensor]:
        """Some rows of what is kept, as leaves; those that want a gradient say so. For compiled code all do: the first
        layer, whose input often wants none, would have code of its own."""
        x = {at: self._rows.of(kept[at], cut).detach() for at in self._kept}
        for at in self._given if self._compiled is None else self._kept:
            x[at].requires_grad_()
        return x

    def _compute(self, leaves: Sequence[Any], cut: slice) -> tuple[list[torch.Tensor], list[Any], TreeSpec]:
        """(tensors that the layer gives for these rows, the leaves of it all with None in their places, its form): what
        it returns, what is recorded inside, and what it writes into mappings."""
        some = [self._rows.of(leaf, cut) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        values, contents = tree_unflatten(some, self._form)
        values, own = list(values), list[MutableMapping[Any, Any]]()
        for (at, ledger), items in zip(self._ledgers.items(), contents, strict=True):
            values[at] = _emptied(ledger)  # others may have written since
            values[at].update(items)
            own.append(values[at])
        kwargs = dict(zip(self._names, values[self._num_args :], strict=True))
        run = self._run if self._compiled is None else compiled_forward(self._run)
        with _recording(self._recorded) as recorded:
            result = run(self.layer, *values[: self._num_args], **kwargs)
        given = [dict(items) for items in contents]
        written = [
            [(key, value) for key, value in ledger.items() if key not in before or before[key] is not value]
            for ledger, before in zip(own, given, strict=True)
        ]
        found, form = tree_flatten((result, recorded, written), is_leaf=lambda value: isinstance(value, Cache))
        tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        return tensors, [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in found], form

    def _joined(self, results: list[tuple[list[torch.Tensor], list[Any], TreeSpec]]) -> list[torch.Tensor]:
        """The cuts' results as those of the whole batch."""
        tensors, *form = results[0]
        self._result_form: Any = form
        if len(results) == 1:
            return tensors
        if any(tensor.ndim == 0 for tensor in tensors):
            raise RuntimeError(
                f"{self.stack.path}.{self.index} returns a number for the whole batch, which does not fit on the "
                "device at once: lower the batch size"
            )
        return [torch.cat(parts) for parts in zip(*(of_cut for of_cut, *_ in results), strict=True)]

    def _returned(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Make what the caller gets; what the layer gave besides goes where it belongs."""
        others, form = self._result_form
        ahead = iter(tensors)
        filled = [next(ahead) if other is None else other[0] for other in others]
        result, recorded, written = tree_unflatten(filled, form)
        collector = output_capturing._active_collector.get() or {}
        for key, found in recorded.items():
            collector[key].extend(found)
        for ledger, items in zip(self._ledgers.values(), written, strict=True):
            ledger.update(items)
        return result

    def _same_autocast(self) -> torch.autocast:
        """Autocast of the forward. Around the second computation alone: gradients of what was computed in fp32 would be
        cast as well, as they are not in the plain model."""
        is_on, dtype = self._amp
        return torch.autocast(self.stack.streaming.device.type, dtype, is_on, cache_enabled=False)


def _refuse_what_has_no_gradient(visit: LayerVisit) -> None:
    """RuntimeError for what a second computation would get wrong. A cache of keys that is empty is left out in it, and
    in training altogether, as transformers' own checkpointing does."""
    name = f"{visit.stack.path}.{visit.index}"
    if getattr(visit.layer, "_can_checkpoint_with_cache", False):
        raise RuntimeError(f"{name} reads other layers' keys from a cache: this model is streamed without gradient")
    for at, leaf in enumerate(visit.leaves):
        if isinstance(leaf, Cache):
            if leaf.get_seq_length(visit.index):
                raise RuntimeError(
                    f"{name} got past keys in a pass with gradient, which streaming does not carry back to them: run "
                    "it under torch.no_grad(), or leave past_key_values out"
                )
            if visit.layer.training:
                visit.leaves[at] = None
        elif isinstance(leaf, list) and any(isinstance(one, torch.Tensor) and one.requires_grad for one in leaf):
            raise RuntimeError(
                f"{name} gets tensors with gradient in a list, where streaming does not follow them: this model cannot "
                "be streamed in training"
            )


class _Layer(torch.autograd.Function):
    """(visit, token, tensors that want a gradient) -> tensors that the layer returns."""

    @staticmethod
    def forward(ctx: Any, visit: LayerVisit, token: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved = visit.forward(given)
        ctx.visit = visit
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, _token(), *ctx.visit.backward(ctx.saved_tensors, grads)


class _Weights(torch.autograd.Function):
    """(visit, trained parameters) -> token."""

    @staticmethod
    def forward(ctx: Any, visit: LayerVisit, *trained: torch.Tensor) -> torch.Tensor:
        ctx.visit = visit
        return _token()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.visit.shipped.take()


def _emptied(ledger: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    empty = copy.copy(ledger)
    empty.clear()
    return empty


def _token() -> torch.Tensor:
    """A number on the CPU, whatever device is the default: its node is to run on the CPU's thread."""
    return torch.zeros((), device="cpu")


def _standing_in(weights: Sequence[Weight]) -> Any:
    return bound([w.owners for w in weights], [w.value for w in weights])


def _trainable(
    weights: Sequence[Weight], trained: Sequence[torch.nn.Parameter]
) -> tuple[list[Weight], list[torch.Tensor]]:
    """(weights, the trained ones as leaves that want a gradient; these leaves in the order of `trained`)."""
    ids = {id(p) for p in trained}
    leaves = {id(w.parameter): w.value.detach().requires_grad_() for w in weights if id(w.parameter) in ids}
    replaced = [w._replace(value=leaves.get(id(w.parameter), w.value)) for w in weights]
    return replaced, [leaves[id(p)] for p in trained]


def _is_whole(value: Any) -> bool:
    """Tuples are looked into; whoever writes to another container means that very one."""
    return not isinstance(value, tuple)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _random_state(device: torch.device) -> list[torch.Tensor]:
    of_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *of_gpu]


def _set_random_state(device: torch.device, state: list[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def _same_random_numbers(device: torch.device, state: list[torch.Tensor] | None) -> Iterator[None]:
    """Random numbers of the forward, whose state was taken in training mode."""
    if state is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        _set_random_state(device, state)
        yield


def _recorded_keys() -> list[str]:
    """List what transformers records of modules inside the layers at present."""
    collector = output_capturing._active_collector.get() or {}
    return [key for key in collector if key != "hidden_states" and not key.startswith("_")]


@contextmanager
def _recording(keys: Sequence[str]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Within this context what is recorded comes here."""
    found: dict[str, list[torch.Tensor]] = {key: [] for key in keys}
    before = output_capturing._active_collector.set(found)
    try:
        yield found
    finally:
        output_capturing._active_collector.reset(before)
