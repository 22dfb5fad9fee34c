"""Passes of a model's parts through a device: weights arrive part by part, each part runs on every call.

    for output in flow.run([Call(batch, "logits")], on_part=hook): ...

`Flow` runs passes forward and keeps no gradient, optimizer or request. Below it: `parts` takes a model apart, `weights`
are their homes and arrival, `layers` runs a part, `tiles` those that do not fit whole, `check` tries a model on a tiny
copy, `trace` tells what happened when."""

from outcore.flow.device_memory import let_segments_grow
from outcore.flow.flow import Call, Flow, OnPart, Output, Passage, PassWatch, Want
from outcore.flow.layers import CompileChoice, CompiledLayers, Head, HeadInput, PartRunner
from outcore.flow.parts import ModelParts, Part, StreamUnsupported, discover_units
from outcore.flow.weights import FixedWeights, WeightArrival, WeightSource
