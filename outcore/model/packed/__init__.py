"""Attention over packed rows by their documents' borders, and whether a model takes it."""

from outcore.model.packed.borders import PACKED_ATTENTION, are_borders, borders_known, borders_of
from outcore.model.packed.kernel import by_kernel
from outcore.model.packed.trial import takes_packed_attention, why_masks_differ, why_no_kernel
