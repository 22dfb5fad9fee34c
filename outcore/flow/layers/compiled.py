"""Layers through torch.compile: one function of each role for all layers that are alike.

A *role* is what is computed of a layer: "forward", and what others register, such as a backward with recomputation.
Without compiler support for a model the layers run eagerly, with the reason said once. Dropout stays eager: graphs of
two roles would draw different numbers from one seed.
Micro-batches of the shape that came first have functions of their own, compiled for just that shape: once rows of
several lengths were seen, the compiler makes code for any length, which would serve the usual shape from then on, too.
Cost: seconds to a minute at the first step, and a recompilation for a new sequence length."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from outcore.common.errors import EngineError
from outcore.common.files import built_folder
from outcore.flow.layers.adapters import with_added_adapters
from outcore.flow.layers.graphs import LayerGraphs
from outcore.flow.layers.packed_linear import with_packed_linears
from outcore.flow.parts import LayerCall, ModelParts, alike, with_memory
from outcore.model.packed import are_borders

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
        """Have layers run in this role, too."""
        self._roles[role] = make

    def is_active(self, layer: int) -> bool:
        """Whether this layer is to be run compiled now: in the mode it is compiled for, until the compiler gave up."""
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
        """What the role's function gives; None when it could not be compiled (then nothing has happened)."""
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
        """Whether this layer, not being compiled, is to be run through graphs: in the same mode, until one fails."""
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
    """What a call of a compiled function raises when it could not be compiled."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return (TorchDynamoException, InductorError)


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
