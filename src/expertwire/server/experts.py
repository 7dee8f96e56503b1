"""Running experts: grouped by expert, in the family's own arithmetic, on the CPU with torch."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import cast

import torch

from ..errors import ConfigError

# Batch-invariant mode: a matrix product has at most this many rows, and at least as many as it
# takes for a row's bits to be the same whatever the count (found at start, ExpertShard._limits).
MAX_ROWS = 64
# A group of more rows is cut into pieces of at least this many.
MIN_PIECE = (MAX_ROWS + 1) // 2
# Activations work on SIMD vectors and do the rest of a run of elements one by one, which rounds
# differently. Where a run ends must therefore not depend on the batch:
SIMD_ELEMENTS = 64  # a row of a multiple of this many elements leaves no rest, in any dtype
DEFAULT_GATES = ("transformers.integrations.moe", f"{__package__}.plain_experts")
SILU = torch.nn.SiLU()
GRAIN_ELEMENTS = 32768  # torch splits larger tensors among threads, anywhere (at::internal)

PER_EXPERT = ("_first", "_down", "_first_bias", "_down_bias")  # of a layer: a list each


class ExpertLayer:
    """The held experts of one layer.

    module: the family's experts module, for its gate, activation and layout flags; its parameters
        are not used. parts: gate_up_proj or up_proj, down_proj, and biases, each
        [held experts, ...] in the family's layout.
    """

    def __init__(self, module: torch.nn.Module, parts: dict[str, torch.Tensor]):
        self._has_gate = getattr(module, "has_gate", True)
        gate = module._apply_gate if self._has_gate else module.act_fn
        self._gate = cast(Callable[[torch.Tensor], torch.Tensor], gate)
        first = "gate_up_proj" if self._has_gate else "up_proj"
        # Views as [in, out]; most families store [out, in], a transposed one [in, out].
        turn = not getattr(module, "is_transposed", False)
        self._first = [w.t() if turn else w for w in parts[first]]
        self._down = [w.t() if turn else w for w in parts["down_proj"]]
        none = [None] * len(self._first)
        self._first_bias = list(parts.get(f"{first}_bias", none))
        self._down_bias = list(parts.get("down_proj_bias", none))
        self.width = self._first[0].shape[1] if self._first else 0
        # The default gate with silu reads halves of rows in one go, so a run of elements is a row,
        # whatever its width.
        plain = self._has_gate and getattr(gate, "__module__", "") in DEFAULT_GATES
        plain = plain and "silu" in type(getattr(module, "act_fn", SILU)).__name__.lower()
        inner = self.width // (2 if self._has_gate else 1)
        self._by_row = not plain and inner % SIMD_ELEMENTS != 0

    def forward(
        self, expert_idx: int, rows: torch.Tensor, batch_invariant: bool = False
    ) -> torch.Tensor:
        """rows [N, H] -> unweighted outputs [N, H] of one held expert (index, not id)."""
        return self.forward_groups([(expert_idx, 0, rows.shape[0])], rows, batch_invariant)

    def forward_groups(
        self, groups: Sequence[tuple[int, int, int]], rows: torch.Tensor,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        """rows [N, H] -> unweighted outputs [N, H]; groups of (held expert, begin, end) rows.

        One product per group and projection. With more than two groups the gate runs once over
        all rows; with fewer, skipping the copies is faster. batch_invariant: the gate runs over
        so few rows at a time that a row's result does not depend on the others.
        """
        gate = self._activate if batch_invariant else self._gate
        if len(groups) == 1:
            i = groups[0][0]
            middle = gate(product(rows, self._first[i], self._first_bias[i]))
            return product(middle, self._down[i], self._down_bias[i])
        output = torch.empty_like(rows)
        if len(groups) == 2:
            for i, begin, end in groups:
                middle = gate(product(rows[begin:end], self._first[i], self._first_bias[i]))
                product(middle, self._down[i], self._down_bias[i], output[begin:end])
            return output
        middle = rows.new_empty((rows.shape[0], self.width))
        for i, begin, end in groups:
            product(rows[begin:end], self._first[i], self._first_bias[i], middle[begin:end])
        middle = gate(middle)
        for i, begin, end in groups:
            product(middle[begin:end], self._down[i], self._down_bias[i], output[begin:end])
        return output

    def _activate(self, middle: torch.Tensor) -> torch.Tensor:
        """The gate, such that where SIMD runs end in a row is the same in every batch."""
        if self._by_row:
            most = 1
        elif torch.get_num_threads() == 1:
            return self._gate(middle)
        else:
            most = max(1, (GRAIN_ELEMENTS - 1) // self.width)
        if middle.shape[0] <= most:
            return self._gate(middle)
        return torch.cat([self._gate(part) for part in middle.split(most)])

    def num_bytes(self) -> int:
        return sum(w.numel() * w.element_size() for w in [*self._first, *self._down])

    def chosen(self, places: Sequence[int], other: ExpertLayer | None = None) -> ExpertLayer:
        """A layer of some experts (indices) of this one, or of this one's and then another's."""
        layer = copy.copy(self)
        for name in PER_EXPERT:
            weights = getattr(self, name) + (getattr(other, name) if other is not None else [])
            setattr(layer, name, [weights[i] for i in places])
        return layer

    def unstack(self) -> None:
        """Gives each expert memory of its own: a slice keeps the whole stack. Bits stay.

        While it runs, a reader finds each weight in its old or in its new place.
        """
        for name in PER_EXPERT:
            setattr(self, name, [_own(weight) for weight in getattr(self, name)])


class ExpertShard:
    """What one server holds: the same experts of every layer."""

    echo = False

    def __init__(
        self, layers: Sequence[ExpertLayer], experts: Sequence[int], hidden_size: int,
        dtype: torch.dtype,
    ):
        self.layers = list(layers)
        self.experts = list(experts)
        self.hidden_size = hidden_size
        self.dtype = dtype

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def extended(self, other: ExpertShard) -> ExpertShard:
        """These experts and those of another shard of the same model; no weights are copied."""
        return self._chosen([*self.experts, *other.experts], other)

    def without(self, experts: Sequence[int]) -> ExpertShard:
        """All but these experts. Their memory goes with this shard, once it is `unstack`ed."""
        gone = set(experts)
        return self._chosen([e for e in self.experts if e not in gone])

    def _chosen(self, experts: list[int], other: ExpertShard | None = None) -> ExpertShard:
        held = [*self.experts, *(other.experts if other is not None else [])]
        places = [held.index(e) for e in sorted(experts)]
        others = other.layers if other is not None else [None] * self.num_layers
        layers = [a.chosen(places, b) for a, b in zip(self.layers, others, strict=True)]
        shard = ExpertShard(layers, sorted(experts), self.hidden_size, self.dtype)
        if "_limits" in self.__dict__:  # found on weights of the same sizes
            shard.__dict__["_limits"] = self._limits
        return shard

    def unstack(self) -> None:
        """See ExpertLayer.unstack; takes one layer's memory more while it runs."""
        for layer in self.layers:
            layer.unstack()

    def run(
        self, layer: int, rows: torch.Tensor, offsets: Sequence[int], batch_invariant: bool = True
    ) -> torch.Tensor:
        """Unweighted expert outputs of rows that are grouped by expert.

        rows: [N, H] in the shard's dtype, contiguous; rows offsets[i] to offsets[i + 1] belong to
        self.experts[i]. Returns [N, H].

        batch_invariant: a row's result bits depend on the row and its expert alone, not on N, the
        row's place, or other rows. Every group that is not empty must have at least `min_rows`
        rows (the gather kernel pads it). A group goes in pieces of min_rows to MAX_ROWS rows, for
        which the matrix library was seen to give a row the same bits (see `_limits`), and
        activations go in parts of whole rows. Raises ConfigError for a smaller group.
        """
        if not batch_invariant:
            ends = pairwise(offsets)
            groups = [(i, a, b) for i, (a, b) in enumerate(ends) if a != b]
            return self.layers[layer].forward_groups(groups, rows)
        min_rows, max_rows, num_threads = self._limits
        groups = []
        begin = offsets[0]
        for i, end in enumerate(offsets[1:]):
            if begin == end:
                continue
            count = end - begin
            if count <= max_rows:
                if count < min_rows:
                    raise ConfigError(
                        f"a group of {count} rows; batch-invariant mode needs {min_rows}"
                    )
                groups.append((i, begin, end))
            else:
                pieces = -(-count // max_rows)
                edges = [begin + count * p // pieces for p in range(pieces + 1)]
                groups += [(i, a, b) for a, b in pairwise(edges)]
            begin = end
        with threads(num_threads):
            return self.layers[layer].forward_groups(groups, rows, True)

    @property
    def min_rows(self) -> int:
        """Batch-invariant mode: rows that a group has at least. Found at the first look."""
        return self._limits[0]

    @functools.cached_property
    def _limits(self) -> tuple[int, int, int]:
        """(rows of a product at least, at most, torch threads), kept from the first look on.

        With several threads the matrix library may cut products differently for every count. If
        no range of counts is wide enough to cut larger groups into, one thread computes; if that
        is not enough either, every row is a product of its own.
        """
        for num_threads in (torch.get_num_threads(), 1):
            with threads(num_threads):
                min_rows = self._find_min_rows()
            if min_rows <= MIN_PIECE:
                return min_rows, MAX_ROWS, num_threads
        return 1, 1, 1

    def _find_min_rows(self) -> int:
        """The least M for which products of M to MAX_ROWS rows all give a row the same bits.

        Matrix libraries promise nothing here; what is usual is one kernel for very few rows and
        another for the rest. So they are tried, on this shard's own first expert.
        """
        if not self.layers:
            return 1
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(MAX_ROWS, self.hidden_size, generator=generator).to(self.dtype)
        layer = self.layers[0]
        with torch.inference_mode():
            expected = layer.forward(0, rows, True)
            for count in tried_counts(self.hidden_size * layer.width):
                # At the front and at the back of the batch: the place must not matter either.
                front = layer.forward(0, rows[:count], True)
                back = layer.forward(0, rows[-count:], True)
                if not (torch.equal(front, expected[:count])
                        and torch.equal(back, expected[-count:])):
                    return count + 1
        return 1


def tried_counts(num_elements: int) -> Sequence[int]:
    """Row counts to compare, descending: all of them, or, where one product takes long (a weight of
    num_elements), those at which libraries change kernels."""
    if num_elements <= 1 << 20:
        return range(MAX_ROWS - 1, 0, -1)
    return (63, 48, 33, 32, 31, 17, 16, 15, 9, 8, 7, 6, 5, 4, 3, 2, 1)


def _own(weight: torch.Tensor | None) -> torch.Tensor | None:
    """The weight with the same strides, in a storage that holds nothing else."""
    if weight is None or weight.untyped_storage().nbytes() == weight.nbytes:
        return weight
    return weight.clone(memory_format=torch.preserve_format)


@contextlib.contextmanager
def threads(num_threads: int) -> Generator[None]:
    """Torch computes with this many threads inside; changing the number costs 0.2 us."""
    before = torch.get_num_threads()
    if before == num_threads:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows @ weight (+ bias): [N, in], [in, out], [out] -> [N, out]."""
    if bias is None:
        return torch.mm(rows, weight, out=out)
    return torch.addmm(bias, rows, weight, out=out)
