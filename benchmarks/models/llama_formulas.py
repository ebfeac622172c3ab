"""A step of a Llama by formulas that can be checked by hand: bytes, FLOPs, and bytes over links.

s b h is the number of tokens of a step times the width, t the ranks that share a layer, p the
parameters of a layer, g and a heads of keys and of queries, i the inner width, v the words.
"""

from __future__ import annotations

from dataclasses import dataclass

import rkgb
from models.llama_rank import Llama

STATE_BYTES = 16  # of a parameter: itself and its gradient in float32, two moments of AdamW
GATHERED = 2  # layers at once: the one that runs, and the next
UNREDUCED = 3  # times a layer in bfloat16: its gradients, and the float32 copy that is being summed
GIB = 2**30
_SHORT = 2  # bytes of a number in bfloat16
_CALLS = 4  # collectives of a layer, forward and backward alike: two gather, two sum
_LOGIT_BYTES = 12  # of each logit at the end: in bfloat16, in float32, its probability, a gradient


@dataclass(frozen=True)
class Device:
    """What a rank has, and its rates; all of it is assumed."""

    memory_bytes: int = 79 * GIB  # that an H100 of 80 GB reports
    reserve_bytes: int = 3 * GIB  # CUDA's context, buffers of NCCL, workspaces of cuBLAS
    flops_per_ms: float = 5e11  # half of what the data sheet says for bfloat16
    memory_bytes_per_ms: float = 2.7e9
    group_bytes_per_ms: float = 3e8  # to each rank of a tensor-parallel group: NVLink
    network_bytes_per_ms: float = 5e7  # to each rank of the others: 400 Gbit/s

    @property
    def cost(self) -> rkgb.FlopCost:
        """FLOPs and bytes, weighed as on this device."""
        return rkgb.FlopCost(flops_per_byte=self.flops_per_ms / self.memory_bytes_per_ms)

    def ms(self, cost: float) -> float:
        """Return the time of 10^9 FLOPs times `cost`."""
        return cost * 1e9 / self.flops_per_ms

    def formula_ms(self, flops: float, moved_bytes: float, link_bytes: float) -> float:
        """Return the time of a layer that computes, reads and writes, and waits for its group."""
        computing = flops / self.flops_per_ms + moved_bytes / self.memory_bytes_per_ms
        return computing + link_bytes / self.group_bytes_per_ms


@dataclass(frozen=True)
class Formulas:
    """One rank of those that share the layers and sequences of a step."""

    size: Llama
    share: int  # t
    sequences: int  # b

    @property
    def numbers(self) -> int:
        """Of one activation of the model's width: s b h."""
        return self.sequences * self.size.tokens * self.size.width

    @property
    def layer_bytes(self) -> int:
        """Of a layer's parameters: 2 p / t."""
        return self.size.layer_parameters * _SHORT // self.share

    @property
    def end_bytes(self) -> int:
        """Of the head's parameters, or the embedding's: 2 v h / t."""
        return self.size.end_parameters * _SHORT // self.share

    @property
    def layer_input_bytes(self) -> int:
        """What is kept of a layer of which everything is computed again: 2 s b h / t."""
        return self.numbers * _SHORT // self.share

    @property
    def kept_bytes(self) -> float:
        """What all layers keep: s b h ((8 + 4 g/a + 8 i/h) / t + 4) for each."""
        own = 8 + 4 * self._groups + 8 * self._inner
        return self.size.layers * self.numbers * (own / self.share + 4)

    @property
    def least_kept_bytes(self) -> int:
        """What they keep if everything is computed again: 2 s b h / t for each."""
        return self.size.layers * self.layer_input_bytes

    @property
    def keeping_all_bytes(self) -> float:
        """The peak of a step that keeps all: in the head, or in the last layer's backward."""
        return self.kept_bytes + max(self._head_bytes, self._layer_turn_bytes)

    @property
    def smallest_bytes(self) -> float:
        """The same if each layer is computed again: while one is, it is there whole."""
        one = self.kept_bytes / self.size.layers
        return self.least_kept_bytes + max(self._head_bytes, self._layer_turn_bytes + one)

    @property
    def forward_flops(self) -> float:
        """Of a layer: 2 b s p / t, and 2 b s s h / t for causal attention."""
        return 2 * self._products + 2 * self._attention

    @property
    def backward_flops(self) -> float:
        """Of a layer: 4 b s p / t, and 5 b s s h / t."""
        return 4 * self._products + 5 * self._attention

    @property
    def forward_bytes(self) -> float:
        """That a layer reads and writes: s b h (14 + c + (28 + c + 8 g/a + 16 i/h) / t) + 2 p/t."""
        shared = 28 + self._moved + 8 * self._groups + 16 * self._inner
        return self.numbers * (14 + self._moved + shared / self.share) + self.layer_bytes

    @property
    def backward_bytes(self) -> float:
        """The same: s b h (46 + c + (40 + c + 16 g/a + 30 i/h) / t) + 4 p / t."""
        shared = 40 + self._moved + 16 * self._groups + 30 * self._inner
        return self.numbers * (46 + self._moved + shared / self.share) + 2 * self.layer_bytes

    @property
    def link_bytes(self) -> float:
        """That come from the others who share the layer: 8 s b h (t - 1) / t, either way."""
        return _CALLS * _SHORT * self.numbers * (self.share - 1) / self.share

    @property
    def _head_bytes(self) -> float:
        """Beside what layers keep: 12 s b v / t, 2 s b h (1 + 1/t), 8 v h / t and 2 p / t."""
        logits = self.sequences * self.size.tokens * self.size.vocab
        around = _SHORT * self.numbers + self.layer_input_bytes
        held = around + (1 + UNREDUCED) * self.end_bytes + self.layer_bytes
        return _LOGIT_BYTES * logits / self.share + held

    @property
    def _layer_turn_bytes(self) -> float:
        """In a layer's backward: 10 p / t, and 2 s b h / t that leave the embedding."""
        return (GATHERED + UNREDUCED) * self.layer_bytes + self.layer_input_bytes

    @property
    def _groups(self) -> float:
        return self.size.groups / self.size.heads

    @property
    def _inner(self) -> float:
        return self.size.inner / self.size.width

    @property
    def _moved(self) -> int:
        """Of a number, by the collectives of a layer: c."""
        return _CALLS * _SHORT if self.share > 1 else 0

    @property
    def _products(self) -> float:
        norms = 2 * self.size.width
        tokens = self.sequences * self.size.tokens
        return tokens * (self.size.layer_parameters - norms) / self.share

    @property
    def _attention(self) -> float:
        return self.numbers * self.size.tokens / self.share
