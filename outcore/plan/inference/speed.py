"""Speed of a placed model's answers: a pass takes the longest of what goes on at once.

That is: weights (and keys and values in RAM) over the link, the drive, the device's memory and arithmetic, the host's
launches; embedding and head that travel have no neighbour to hide behind. A CPU that computes runs Python in between,
which nothing hides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outcore.common.quantities import GB
from outcore.plan.constants import ATTENTION_SHARE
from outcore.plan.hardware import Hardware
from outcore.plan.inference.needs import kv_of, state_bytes_of
from outcore.plan.terms import Pass
from outcore.sizing.inference import InPlaceRates, KvSize, Placement, pairs, row_cost_of
from outcore.sizing.shape import ModelShape

COMPILED_SHARE = 0.23
"""Share of `host_layer_s`, which is an eager layer's forward, recomputation and backward: what a call of a compiled
layer outside a CUDA graph takes, attention included: 0.9 to 1.5 ms where that took 3.7 to 6.5, on an H100's host."""
ARRIVAL_SHARE = 0.1
"""Share for a layer that travels, once a pass: 0.45 ms for queueing its copies and what waits for them, there."""
EXPAND_SHARE = 0.04
"""Share for expanding the weights of a packed layer, once a pass: seven kernels, queued again by their addresses, 0.2
ms on such a host (assumed; with the look-up of addresses it was 0.5)."""
EAGER_SHARE = 0.4
"""Share of `host_layer_s` that a call of an eager layer takes, a little more than a compiled one's (assumed)."""
ANSWER_S = 3.5e-5
"""Python of each answer between passes: choosing its token, its place in the next pass, its text. Measured with 32
answers of 1 B on an H100's host."""
LATER_SHARE = 0.33
"""Share for the attention of a later chunk of a prompt, which goes over what stands before and then over itself, beside
the call of the layer: 1.3 to 1.8 ms in the same runs."""
PACK_SHARE = 0.12
"""Share for rounding keys and values of a call to 8 bits: 1 ms more a call with prompts of 448 tokens of 3 B while each
was rounded by itself, in 24 launches; 14 since (their time is assumed)."""
KEY_S = 17.5e-9
"""Seconds of a layer's attention for each token that a row sees, where few rows have a CUDA graph: one block of threads
walks along a key head. Measured with one row over 100,000 tokens of 8 B on an H100."""
CPU_LAYER_S, CPU_SPAN_S = 3.3e-4, 8e-6
"""Python and launches of one eager layer's call on a CPU, and of each answer's attention in it. Measured with tiny
layers on one core of an EPYC (Zen 3) at 2 to 16 layers and 1 to 32 answers: 1.6 to 8.6 ms a pass."""
CPU_SHARE, HAND_OVER_S = 0.85, 15e-6
"""Share of the RAM's rate at which a CPU's kernels read packed experts, where no start measured it, and seconds of a
GPU's question and its answer (assumed)."""
KV_LINK_SHARE = 0.7
"""Share of the link's rate for copies at which a GPU's attention reads keys and values in RAM: 0.76 by a pass over 64
answers of 8 B in bf16 on an H100, 0.60 by two of 32 B in q4_k with other work beside."""
PRODUCTS_S = 7 * 4e-6
"""Seconds of a layer's seven products with weights that stay packed, beyond their bytes at the rate of the largest of
them, on which a byte's seconds are measured: passes of eight tokens of 3 B took 4.4 ms beside the choice of tokens, 28
layers, on an H100, four runs."""
CPU_TFLOPS = 0.1
"""Rate of a CPU whose rate was not measured: about what eight cores with AVX2 reach in fp32."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass, by what would take them if it were alone."""

    terms: Mapping[str, float]
    between: Mapping[str, float]
    """Seconds that nothing hides."""

    @property
    def binding(self) -> str:
        """Name of the term that takes longest."""
        found = {**self.terms, **self.between}
        return max(found, key=lambda name: found[name])

    @property
    def seconds(self) -> float:
        return max(self.terms.values()) + sum(self.between.values())


@dataclass(frozen=True)
class InferencePlan:
    """A placement and its speed."""

    shape: ModelShape
    hardware: Hardware
    placement: Placement
    kv: KvSize
    itemsize: int

    def decode(self, streams: int, context: int, hit_rate: float = 0.0) -> PassTime:
        """One token for each of so many answers of this length."""
        return self.pass_time(streams, streams * context, streams, streams * context, hit_rate)

    @property
    def hit_rates(self) -> tuple[float, ...]:
        """Hit rates between which a run's will lie: only the run knows how alike its tokens choose."""
        return (0.0,) if self.placement.experts is None else (0.0, 1.0)

    def first_token_s(self, prompt_tokens: int, streams: int = 1) -> float:
        """From the arrival of so many prompts of this length to the first token of all, when nothing else runs."""
        most = self.placement.pass_tokens
        if streams > 1 and prompt_tokens > most:
            return streams * self.first_token_s(prompt_tokens)
        cost, seconds, done, whole = row_cost_of(self.shape, self.kv), 0.0, 0, streams * prompt_tokens
        of_prompts = cost.of(0, prompt_tokens) / prompt_tokens  # as the scheduler fills passes beside answers
        while done < whole:
            begun, at = divmod(done, prompt_tokens)  # answers that write meanwhile; where the next prompt goes on
            room = max(most - begun * cost.of(prompt_tokens, 1), cost.LEAST_READ * most) / of_prompts if begun else most
            rows = max(1, min(int(room), most - begun, whole - done))
            answers = max(1, (done + rows) // prompt_tokens)
            kv_tokens = begun * prompt_tokens + at + rows
            if streams > 1:
                seen = begun * prompt_tokens + rows / prompt_tokens * pairs(0, prompt_tokens)
            else:
                seen = pairs(at, rows)
            seconds += self.pass_time(begun + rows, kv_tokens, answers, seen).seconds
            done += rows
        return seconds

    def tokens_per_s(self, streams: int, context: int, hit_rate: float = 0.0) -> float:
        """Rate of all answers together; those that do not fit at once take turns."""
        at_once = max(1, min(streams, self.placement.max_sequences, self.most_streams(context)))
        return at_once / self.decode(at_once, context, hit_rate).seconds

    def most_streams(self, context: int) -> int:
        """Answers of this length whose keys and values fit at once."""
        return self.placement.kv_bytes // max(1, self.kv.sequence_bytes(context, self.placement.chunk_tokens))

    def pass_time(self, rows: float, kv_tokens: float, answers: int, seen: float, hit_rate: float = 0.0) -> PassTime:
        """A pass of so many tokens, that reads keys and values of so many, and ends in logits for so many answers.
        `seen`: sum over its tokens of those that each sees (`outcore.sizing.inference.pairs`). `hit_rate`: share of
        the experts chosen that are on the device, where they come as they are chosen."""
        traffic = self.traffic(rows, kv_tokens, answers, seen, hit_rate)
        found = InferenceRates(self.hardware).seconds(traffic, self._unhidden_bytes(), answers)
        keys_s = 0.0
        if not self.hardware.is_cpu:
            if rows <= self.placement.pass_size().graph_rows:  # the engine runs it as a CUDA graph
                one_bytes = self.kv.read_bytes(kv_tokens / max(1, answers), 1, 1)
                keys_s = self.shape.num_layers * KEY_S * one_bytes / max(1, self.kv.token_bytes)
            gpu_s = max(found.terms["GPU"], self._packed_s(rows)) + keys_s
            found = PassTime({**found.terms, "GPU": gpu_s}, found.between)
        if self._is_few(rows):
            of_cpu = {"CPU": self._few_experts_s(rows, hit_rate)}
            return PassTime(found.terms, {**found.between, **of_cpu})
        rates = self.placement.cpu_rates
        if rates is not None and self.placement.on_cpu(rows):
            return PassTime({**found.terms, **self._beside_cpu_s(rows, traffic, rates, found, keys_s)}, found.between)
        if not self.hardware.is_cpu:
            return found
        calls = self.shape.num_layers * math.ceil(rows / self.placement.chunk_tokens)
        python_s = calls * CPU_LAYER_S + self.shape.num_layers * answers * CPU_SPAN_S
        return PassTime(found.terms, {**found.between, "Python": python_s})

    def _beside_cpu_s(
        self, rows: float, traffic: Pass, rates: InPlaceRates, found: PassTime, keys_s: float
    ) -> dict[str, float]:
        """Seconds of the link beside a CPU that computes, and of that CPU, which waits while the GPU's attention goes
        over long contexts (`keys_s`) and reads them in RAM."""
        link_s = max(found.terms["PCIe"], traffic.h2d_bytes / (rates.link_gb_per_s * GB))
        on_cpu = self.placement.on_cpu(rows)
        size = self.placement.size_of(on_cpu)
        kv_bytes = traffic.h2d_bytes - (self.placement.travelling_bytes - size)
        kv_s = kv_bytes / (self.hardware.h2d_gb_per_s * GB)
        return {"PCIe": link_s, "CPU": rates.cpu_s(len(on_cpu), size, rows) + kv_s + keys_s}

    def traffic(self, rows: float, kv_tokens: float, answers: int, seen: float, hit_rate: float = 0.0) -> Pass:
        """Count what a pass of so many rows moves and computes."""
        shape, placement, is_cpu = self.shape, self.placement, self.hardware.is_cpu
        kv_bytes = self.kv.read_bytes(kv_tokens, answers, rows)
        states_bytes = 2 * answers * state_bytes_of(shape, self.itemsize)  # read, and written
        windows = shape.windows or ((None, shape.num_layers),)
        seen_by_layers = sum(layers * min(seen, rows * (window or math.inf)) for window, layers in windows)
        kv_travels = placement.kv_home != "vram"
        is_few = self._is_few(rows)
        fits_graph = rows <= placement.pass_size().graph_rows
        is_graph = fits_graph and placement.kv_home != "nvme" and (is_few or not placement.expert_slots)
        calls = 0 if is_graph else math.ceil(rows / placement.chunk_tokens)
        call_share = EAGER_SHARE if placement.expert_slots else COMPILED_SHARE
        # Answers of one token each go together, so that one of them is no later chunk.
        later = max(0, calls - max(1, answers)) + (kv_tokens > rows) if calls and rows >= 2 * answers else 0
        expands = bool(calls and self._expanded_bytes(rows, 0.0))
        is_packed = self.kv.token_bytes < kv_of(shape, self.itemsize).token_bytes
        travelling_bytes = placement.travelling_bytes - placement.size_of(placement.on_cpu(rows))
        chosen = placement.expert_share(rows)
        unread = 1.0 - chosen * (1.0 - hit_rate)
        experts = {home: placement.expert_bytes_at(home) for home in ("ram", "nvme")}
        hits_bytes = chosen * hit_rate * sum(experts.values())
        travelling_bytes += 0.0 if is_few else (1.0 - unread) * sum(experts.values())
        resident_bytes = placement.bytes_at("vram") + (0 if kv_travels else kv_bytes)
        return Pass(
            flops=2.0 * rows * shape.active_layer_params + 2.0 * answers * shape.head_weight_numel,
            attention_flops=4.0 * seen_by_layers * shape.num_heads * shape.head_dim,
            device_bytes=resident_bytes
            + hits_bytes
            + travelling_bytes
            + self._expanded_bytes(rows, 0.0 if is_few else chosen)
            + states_bytes,
            launched_layers=shape.num_layers
            * (calls * (call_share + is_packed * PACK_SHARE) + later * LATER_SHARE + expands * EXPAND_SHARE)
            + (ARRIVAL_SHARE * placement.num_arriving if calls else 0.0),
            h2d_bytes=travelling_bytes
            + kv_bytes * {"vram": 0.0, "ram": 1 / KV_LINK_SHARE, "nvme": 1.0}[placement.kv_home],
            read_bytes=placement.bytes_at("nvme")
            - (1.0 if is_few else unread) * experts["nvme"]
            + (kv_bytes if placement.kv_home == "nvme" else 0),
            ram_bytes=placement.bytes_at("ram") - unread * experts["ram"] + kv_bytes + states_bytes if is_cpu else 0.0,
        )

    def _is_few(self, rows: float) -> bool:
        """Whether the experts that a pass of so many tokens chose are computed where they lie."""
        return not self.hardware.is_cpu and rows <= self.placement.few_tokens

    def _few_experts_s(self, rows: float, hit_rate: float) -> float:
        """Seconds in which the CPU reads and computes the experts chosen that are in no slot, for which the GPU
        waits."""
        placement, rates = self.placement, self.placement.cpu_rates
        assert placement.experts is not None
        missed = placement.expert_share(rows) * (1.0 - hit_rate)
        on_drive_bytes = missed * placement.expert_bytes_at("nvme")
        missed_bytes = on_drive_bytes + missed * placement.expert_bytes_at("ram")
        gb_per_s = self.hardware.ram_gb_per_s * CPU_SHARE if rates is None else rates.gb_per_s(rows)
        read_s = on_drive_bytes / (self.hardware.drive_read_gb_per_s * GB) if on_drive_bytes else 0.0
        return read_s + missed_bytes / (gb_per_s * GB) + 2 * placement.experts.num_layers * HAND_OVER_S

    def _expanded_bytes(self, rows: float, chosen: float) -> float:
        """Bytes of packed layers as they are used: written once and read once in a pass of so many tokens. `chosen`:
        share of experts that are, where they come as they are chosen."""
        shape, placement = self.shape, self.placement
        if not shape.quantize:
            return 0
        experts = sum(shape.expert_params)
        expanded = sum(shape.layer_params) - experts
        if self._are_as_they_are(rows):
            expanded = 0
        return 2 * self.itemsize * (expanded + experts * (chosen if placement.expert_slots else 1.0))

    def _are_as_they_are(self, rows: float) -> bool:
        """Whether a GPU multiplies by packed layers as they are, but for stacks of experts, which are expanded."""
        return rows <= self.placement.packed_tokens and bool(self.placement.expert_slots or not self.shape.is_moe)

    def _packed_s(self, rows: float) -> float:
        """Seconds of a GPU's kernels on packed layers as they are; 0: there are none."""
        if not self.shape.quantize or not self._are_as_they_are(rows):
            return 0.0
        on_cpu = self.placement.on_cpu(rows)
        layers = [part for part in self.placement.parts if part.part.startswith("layer") and not part.is_experts]
        there = [part.size_bytes for part in layers if part.part not in on_cpu]
        of_byte_s = next(seconds for most, seconds in sorted(self.placement.packed_s.items()) if most >= rows)
        return sum(there) * of_byte_s + len(there) * PRODUCTS_S

    def _unhidden_bytes(self) -> float:
        """Bytes of embedding and head, which have no neighbour to hide behind: half hides behind the last layers."""
        ends = [p for p in self.placement.parts if not p.part.startswith("layer") and p.travels]
        return ends[-1].size_bytes / 2 if ends and not self.hardware.is_cpu else 0.0


@dataclass(frozen=True)
class InferenceRates:
    """One machine; everything of a pass overlaps without a residue."""

    hardware: Hardware

    def seconds(self, one: Pass, unhidden_bytes: float, answers: int) -> PassTime:
        """A pass by term. `answers`: tokens that it chooses."""
        hw = self.hardware
        flops = one.flops + one.attention_flops / ATTENTION_SHARE
        terms: dict[str, float] = {}
        if hw.is_cpu:
            terms["RAM"] = one.ram_bytes / (hw.ram_gb_per_s * GB)
            terms["CPU arithmetic"] = flops / ((hw.compute_tflops or CPU_TFLOPS) * 1e12)
        else:
            terms["PCIe"] = one.h2d_bytes / (hw.h2d_gb_per_s * GB)
            memory_s = one.device_bytes / (hw.memory_gb_per_s * GB)
            compute_s = flops / (hw.compute_tflops * 1e12) if hw.compute_tflops else 0.0
            terms["GPU"] = max(memory_s, compute_s)
            terms["launches"] = hw.host_s(one.launched_layers)
        if one.read_bytes:
            terms["NVMe"] = one.read_bytes / (hw.drive_read_gb_per_s * GB)
        between = {"choosing tokens": InPlaceRates.BETWEEN_S + (0.0 if hw.is_cpu else answers * ANSWER_S)}
        if unhidden_bytes:
            between["embedding or head"] = unhidden_bytes / (hw.h2d_gb_per_s * GB)
        return PassTime(terms, between)
