"""Layers through torch.compile: one function of each role for all layers that are alike.

A *role* is what is computed of a layer: "forward", and what others register, such as a backward with recomputation.
Without compiler support for a model the layers run eagerly, with the reason said once. Dropout stays eager: graphs of
two roles would draw different numbers from one seed. Micro-batches of the first shape have functions of their own,
compiled for just that shape. Once the compiler has seen several lengths it makes slower code for any length, and would
then use that for the usual shape, too. Cost: seconds to a minute at the first step, and a recompilation for a new
sequence length.

LoRA's adapters as compiled layers run them: added to the product of the frozen weight in place.

peft computes y = W x + s B (A x) as three tensors of y's width (the weight's part, the adapter's part, their sum), and
scales the gradient of y in a fourth. A compiler joins sum and scaling with what is beside them, and so keeps both parts
of every projection until then: 11 tensors of the MLP's width at once in the backward of a layer of Llama, which without
adapters has 6 (counted in the code that torch 2.13's compiler makes for the CPU). Here weight and adapter are one
operation, which the compiler does not look into: the matrix product that makes the adapter's part adds it to the
weight's, and the scale is on the thin side. Going back

    dL/dx = W' g + s A' (B' g),  dL/dA = s (B' g) x',  dL/dB = s g (A x)',  with g = dL/dy

of which the first is the same operation again. The numbers are peft's up to rounding."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from outcore.common.errors import EngineError
from outcore.common.files import built_folder
from outcore.flow.layers.graphs import LayerGraphs
from outcore.flow.layers.packed_linear import with_packed_linears
from outcore.flow.parts import LayerCall, ModelParts, Stand, alike, shell_of, with_memory
from outcore.model.forward import Float8Linear, float8_product, float8_rounded
from outcore.model.packed import are_borders


@torch.library.custom_op("outcore::adapted_linear", mutates_args=())
def adapted_linear(
    x: torch.Tensor,
    sides: list[torch.Tensor],
    bias: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    of_gradient: bool,
) -> torch.Tensor:
    """x [..., in], bias [out] or None, down (A) [rank, in], up (B) [out, rank] -> [..., out].

    `sides`: the weight [out, in]; where its product is in float8, x and the weight of `float8_product`. `of_gradient`:
    x is one."""
    rows = x.reshape(-1, x.shape[-1])
    if len(sides) > 1:
        y = float8_product(sides[:2], sides[2:], fast_sums=not of_gradient)
        if bias is not None:
            y += bias
    else:
        y = linear(rows, sides[0], bias)
    y.addmm_(linear(rows, down).mul_(scale), up.t())
    return y.view(*x.shape[:-1], -1)


@adapted_linear.register_fake
def _(x: torch.Tensor, sides: Any, bias: Any, down: Any, up: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], up.shape[0]))


class _Adapted(torch.autograd.Function):
    """`adapted_linear`, differentiable in all but the weight, also for `torch.func`. `in_8_bits`: the weight for
    `recipe`'s products, and the transposed one where a gradient is asked for; nothing without a recipe.

    The gradient of x is the same operation with everything transposed; the thin ones are the compiler's, so that x can
    go before the gradient of x comes."""

    @staticmethod
    def forward(
        x: Any, weight: Any, bias: Any, down: Any, up: Any, scale: float, recipe: str, *in_8_bits: torch.Tensor
    ) -> torch.Tensor:
        sides = [*_rounded(x, recipe, of_gradient=False), *in_8_bits[:2]] if recipe else [weight]
        return adapted_linear(x, sides, bias, down, up, scale, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, bias, down, up, ctx.scale, ctx.recipe, *in_8_bits = inputs
        ctx.trains_bias = bias is not None and ctx.needs_input_grad[2]
        ctx.save_for_backward(x, down, up, *in_8_bits[2:] if ctx.recipe else [weight])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad,), (x, down, up, *sides) = grad_outputs, ctx.saved_tensors
        rows, g = x.flatten(0, -2), grad.flatten(0, -2)
        grad_down = (g @ (ctx.scale * up)).t() @ rows
        grad_up = g.t() @ (rows @ (ctx.scale * down).t())
        grad_x = None
        if ctx.needs_input_grad[0]:
            sides = [*_rounded(grad, ctx.recipe, of_gradient=True), *sides] if ctx.recipe else [sides[0].t()]
            grad_x = adapted_linear(grad, sides, None, up.t(), down.t(), ctx.scale, True)
        grad_bias = g.sum(0) if ctx.trains_bias else None
        return grad_x, None, grad_bias, grad_down, grad_up, *(None for _ in ctx.needs_input_grad[5:])


def _rounded(x: torch.Tensor, recipe: str, *, of_gradient: bool) -> list[torch.Tensor]:
    return float8_rounded(x.flatten(0, -2), recipe, of_gradient, False)


def _adapted(x: Any, weight: Any, bias: Any, down: Any, up: Any, scale: float, recipe: str) -> torch.Tensor:
    to_x = torch.is_grad_enabled() and x.requires_grad
    in_8_bits = float8_rounded(weight, recipe, False, to_x) if recipe else []
    return _Adapted.apply(x, weight, bias, down, up, scale, recipe, *in_8_bits)  # pyright: ignore[reportReturnType]


@cache  # not at import: it imports the compiler, 1.4 s that runs without it need not wait for
def _tell_compiler() -> None:
    """torch 2.10's cannot look into an autograd.Function below torch.func, so that it takes the call as it is."""
    torch.compiler.allow_in_graph(_adapted)


def with_added_adapters(layer: nn.Module) -> nn.Module:
    """The layer with its plain adapters on linear layers computed as above, sharing everything else; the layer itself
    when it has none."""
    replaced = {path: AddedAdapter(module) for path, module in layer.named_modules() if _is_plain(module)}
    if not replaced:
        return layer
    _tell_compiler()
    return shell_of(layer, replaced)


class AddedAdapter(Stand):
    """Stands for peft's module around one linear layer with one adapter at work; shares its parameters.

    `forward(x)`: x [..., in] -> [..., out]."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        (name,) = original.active_adapters
        self.base_layer = original.base_layer
        self.lora_A, self.lora_B = original.lora_A[name], original.lora_B[name]
        self.scale = float(original.scaling[name])
        self.is_transposed = bool(original.fan_in_fan_out)
        self.recipe = original.base_layer.recipe if isinstance(original.base_layer, Float8Linear) else ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base_layer
        weight = base.weight.t() if self.is_transposed else base.weight
        return _adapted(x, weight, base.bias, self.lora_A.weight, self.lora_B.weight, self.scale, self.recipe)


def _is_plain(module: Any) -> bool:
    """Whether this is a linear layer of frozen weight (or GPT-2's Conv1D) under one adapter of peft's, no other there
    and this one at work, without dropout, variant (DoRA) or a bias of its own, all in one type."""
    peft = sys.modules.get("peft.tuners.lora.layer")  # whoever made adapters has imported it
    if peft is None or type(module) is not peft.Linear or module.disable_adapters or module.merged:
        return False
    names, base = list(module.active_adapters), module.base_layer
    if len(names) != 1 or list(module.lora_A) != names:  # one at rest has parameters, too
        return False
    if names[0] in module.lora_variant:
        return False
    thin, wide = module.lora_A[names[0]], module.lora_B[names[0]]
    if type(thin) is not nn.Linear or type(wide) is not nn.Linear or thin.bias is not None or wide.bias is not None:
        return False
    if type(base) not in (nn.Linear, Float8Linear, Conv1D) or base.weight.requires_grad:
        return False
    if not isinstance(module.lora_dropout[names[0]], nn.Identity):
        return False
    return base.weight.dtype == thin.weight.dtype == wide.weight.dtype


logger = logging.getLogger(__name__)

CompileChoice = Literal["auto", "on", "off"]
MAX_RECOMPILES = 64
"""Graphs per function: kinds of layers x shapes. torch's default of 8 would be reached by long-tailed row lengths."""

LayerForward = Callable[[Sequence[torch.Tensor], torch.Tensor, tuple, dict], torch.Tensor]
"""(tensors in slot order, hidden, args, kwargs) -> hidden."""
Role = Callable[[LayerForward, Sequence[bool]], Callable[..., Any]]
"""Makes a role's function from a layer's forward and, slot by slot, whether that parameter is trained. It takes what
the forward takes, and perhaps more tensors: (tensors, hidden, args, kwargs, *more)."""
PACKED = "packed forward"
"""The role of layers that get the bytes of their packed weights (`SlabLayout.home_views`) on a GPU."""
LOAD_TIMEOUT_S = 120.0
"""Importing the compiler takes seconds; whoever needs it waits for the rest."""


def keep_compiled_code() -> None:
    """Have the compiler keep what it makes beside what else was built for this environment. Its own choice, a folder in
    /tmp, which many systems empty when they start, stays where that cannot be written; another folder is the user's."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    known = os.environ.get(name)
    if known is not None and not known.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        return
    processor = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    folder = built_folder() / "torch_compiled" / f"{torch.__version__}-{processor}".lower().replace(" ", "-")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ[name] = str(folder)


class CompiledLayers:
    """The functions of all roles, and the graphs that run them. `why_not` says why layers run eagerly; '' while they
    are compiled. `training`: in which mode of theirs layers are compiled; in the other they run eagerly. `any_shape`:
    no shape is the usual one, and code for any number of tokens is made at once (and for a single one)."""

    def __init__(
        self,
        units: ModelParts,
        choice: CompileChoice,
        backend: str | Callable[..., Any] = "inductor",
        *,
        share: bool = True,
        graphs: LayerGraphs | None = None,
        training: bool = True,
        any_shape: bool = False,
    ) -> None:
        self.units, self.choice, self._training = units, choice, training
        self._any_shape = any_shape
        self.why_not = "compile: off" if choice == "off" else ""
        self._like = alike(units.layers) if share else list(range(len(units.layers)))
        self._backend = backend
        self.graphs = graphs
        self.graphs_fit_eager = False
        """Whether eager layers may be captured: nothing random in them, nobody looks into them, and those that are
        alike may share a graph."""
        self._roles: dict[str, Role] = {name: lambda forward, trainable: forward for name in ("forward", PACKED)}
        self._packed: dict[Hashable, int] = {}
        """The first layer of each kind and packed formats."""
        self._takes_packed: dict[int, bool] = {}
        self._functions: dict[tuple[str, int, bool], Callable[..., Any]] = {}
        """Functions by role, kind, and whether for the usual shape only."""
        self._fused: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._usual: torch.Size | None = None
        self.is_compiling = False
        """Whether a function is in its first call, which waits for the compiler."""
        if not self.why_not:  # for good, not in a context around every call
            keep_compiled_code()
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, MAX_RECOMPILES)

    @property
    def num_kinds(self) -> int:
        """Different layers, each compiled once."""
        return len(set(self._like))

    @contextmanager
    def loading_compiler(self) -> Iterator[None]:
        """Have torch's compiler imported (seconds) in a thread while the block runs, which must import nothing itself;
        without effect where layers run eagerly. An import that fails does so again, and is told, at the first step."""

        def load() -> None:
            with suppress(Exception):
                importlib.import_module("torch._inductor.compile_fx")
                torch._dynamo.list_backends()  # looks each of them up, as the first compilation does

        if self.why_not or self._backend != "inductor":
            yield
            return
        thread = threading.Thread(target=load, name="load-compiler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(LOAD_TIMEOUT_S)

    def register(self, role: str, make: Role) -> None:
        """Let layers also run in this role."""
        self._roles[role] = make

    def is_active(self, layer: int) -> bool:
        """Whether this layer runs compiled: in the mode that it was compiled for, and unless the compiler gave up."""
        return not self.why_not and self.units.layers[layer].training is self._training

    def takes_packed(self, layer: int) -> bool:
        """Whether this layer can be run in the role `PACKED`."""
        if layer not in self._takes_packed:
            template = with_packed_linears(self.units.layers[layer], self.units.layer_units[layer])
            self._takes_packed[layer] = template is not None
        return self._takes_packed[layer]

    def _kind(self, role: str, layer: int) -> int:
        kind = self._like[layer]
        if role != PACKED:
            return kind
        specs = tuple(slot.packed for slot in self.units.layer_units[layer].layout.slots)
        return self._packed.setdefault((kind, specs), layer)

    def give_up(self, reason: str) -> None:
        """Run eagerly from now on. EngineError when compilation was asked for."""
        if self.choice == "on":
            raise EngineError(f"compile: on, but the layers cannot be compiled: {reason} Set compile: auto or off.")
        self.why_not = reason
        logger.warning("layers run eagerly: %s", reason)

    def cannot(self, reason: str) -> None:
        """`give_up`, unless it was not asked for."""
        if not self.why_not:
            self.give_up(reason)

    def run(
        self,
        role: str,
        layer: int,
        tensors: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        call: LayerCall,
        *more: Any,
    ) -> Any:
        """Result of the role's function; None when it could not be compiled (then nothing has happened)."""
        for value in (*call.args, *call.kwargs.values()):
            if are_borders(value):  # one code for any number of documents
                torch._dynamo.maybe_mark_dynamic(value, 0)
        if self._any_shape:
            _mark_tokens(hidden, call)
        elif self._usual is None:
            self._usual = hidden.shape
        kind, usual = self._kind(role, layer), hidden.shape == self._usual
        args = (list(tensors), hidden, call.args, call.kwargs, *more)
        self.is_compiling = (role, kind, usual) not in self._functions
        if self.is_compiling:
            self._functions[role, kind, usual] = self._compile(role, kind, usual=usual)
        try:
            with torch.no_grad():
                function = self._functions[role, kind, usual]
                if self.graphs is None:
                    return function(*args)
                return self.graphs.run((kind, role), function, *args)
        except compiler_errors() as error:
            self._failed(error)
            return None
        finally:
            self.is_compiling = False

    def _failed(self, error: BaseException) -> None:
        text = str(error).strip().splitlines()
        self.give_up(f"torch.compile failed ({type(error).__name__}: {text[0][:300] if text else ''}).")

    def fused(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, which is no layer's, in few kernels that take any number of rows."""
        if function not in self._fused:
            self._fused[function] = torch.compile(function, fullgraph=True, backend=self._backend)
        for value in args:
            if isinstance(value, torch.Tensor) and len(value) > 1:
                torch._dynamo.maybe_mark_dynamic(value, 0)
        try:
            return self._fused[function](*args)
        except compiler_errors() as error:
            self._failed(error)
            return function(*args)

    def has_eager_graphs(self, layer: int) -> bool:
        """Whether this layer runs through CUDA graphs without being compiled: in the same mode, and until one fails."""
        return (
            self.graphs is not None
            and self.graphs_fit_eager
            and not self.graphs.why_not
            and not self.is_active(layer)
            and self.units.layers[layer].training is self._training
        )

    def eager(
        self,
        role: str,
        layer: int,
        function: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        call: LayerCall,
        *more: Any,
    ) -> torch.Tensor:
        """`function(layer, tensors, hidden, args, kwargs, *more)` through a graph that layers that are alike share."""
        assert self.graphs is not None
        name = ("eager", self._like[layer], role)
        with torch.no_grad():
            return self.graphs.run(name, partial(function, layer), list(tensors), hidden, call.args, call.kwargs, *more)

    def _compile(self, role: str, kind: int, *, usual: bool) -> Callable[..., Any]:
        unit, layer = self.units.layer_units[kind], self.units.layers[kind]
        template = with_packed_linears(layer, unit) if role == PACKED else with_added_adapters(layer)
        assert template is not None, "takes_packed says so"
        names = _names_in(template, unit.parameters)

        def forward(tensors: Sequence[torch.Tensor], hidden: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
            # What a layer writes to a mapping must not leave the compiled code.
            own = {name: {**value} if isinstance(value, MutableMapping) else value for name, value in kwargs.items()}
            output = functional_call(template, dict(zip(names, tensors, strict=True)), (hidden, *args), own)
            return output if isinstance(output, torch.Tensor) else output[0]

        function: Any = self._roles[role](forward, [slot.trainable for slot in unit.layout.slots])
        if usual:  # a code object of its own: what was compiled is looked up by it
            function.__code__ = function.__code__.replace(co_name=f"{role}_usual")
        return torch.compile(function, fullgraph=True, backend=self._backend, dynamic=False if usual else None)


def _mark_tokens(hidden: torch.Tensor, call: LayerCall) -> None:
    """Tell the compiler that the number of tokens varies. A single one has code of its own whatever is said."""
    num_tokens = hidden.shape[1]
    if num_tokens == 1:
        return
    for value in tree_leaves((hidden, call.args, call.kwargs)):
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == num_tokens:
            torch._dynamo.maybe_mark_dynamic(value, 1)


def _names_in(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[str]:
    by_id = {id(p): name for name, p in module.named_parameters()}
    return [by_id[id(p)] for p in parameters]


def compiler_errors() -> tuple[type[BaseException], ...]:
    """Exceptions that a compiled function raises when it could not be compiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError

    return (TorchDynamoException, FailOnRecompileLimitHit, InductorError)


def draws_random_numbers(units: ModelParts) -> bool:
    """Whether any kind of layer has dropout at work: tried on two tokens per kind, on the CPU, in training mode."""
    log = units.record({"input_ids": torch.zeros((1, 2), dtype=torch.long)})
    before = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            for index in set(alike(units.layers)):
                call = log.call(index)
                with with_memory(units.layers[index]) as layer:
                    layer(log.hidden, *call.args, **call.kwargs)
        return not torch.equal(before, torch.default_generator.get_state())
    finally:
        torch.default_generator.set_state(before)
