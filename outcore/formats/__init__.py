"""Packed weights: bits, block, bytes per row, an exact reference in torch, forms for the GPU and the CPU.

`packed_format(name)` gives a format, `PackedSpec` its size for one weight and `expand`, from packed bytes to the 16-bit
values; `open_packed` reads published checkpoints. `docs/formats.md` is the guide."""

from outcore.formats.feed import PackedWeights, open_packed
from outcore.formats.ggml import QUANTIZE_CHOICES, packed_format
from outcore.formats.gpu_products import DeviceProducts, device_products
from outcore.formats.kernel_layout import Again
from outcore.formats.packed import PackedFormat, PackedSpec, PackedTensor, Plane
from outcore.formats.plain import PLAIN_FORMATS
from outcore.formats.products import PackedProducts, Scattered, call_of, stack_of
