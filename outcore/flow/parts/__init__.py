"""A causal language model taken apart by structure: embedding, layers and head, run by the model's own code."""

from outcore.flow.parts.discovery import cpu_specs, discover_units, module_lists, packing_rule
from outcore.flow.parts.layout import SlabLayout, Slot, several_types
from outcore.flow.parts.shell import CallLog, LayerCall, Stand, StreamUnsupported, bound, shell_of, with_memory
from outcore.flow.parts.structure import alike, needs_of_parts, run_shape
from outcore.flow.parts.units import DeviceBatch, ModelParts, Part
