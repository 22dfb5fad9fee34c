"""Homes of the 16-bit parameters in RAM and on NVMe, and their arrival on the device."""

from outcore.flow.weights.homes import Expansion, FixedWeights, WeightArrival, WeightHomes, WeightSource
from outcore.flow.weights.packed_weight import HandOver, InPlaceProducts, PackedWeight
from outcore.flow.weights.prefetch import RangeUpload, SlabRanges, WeightPrefetcher, settle
from outcore.flow.weights.scratch import Scratch, Verification, choose_verification
