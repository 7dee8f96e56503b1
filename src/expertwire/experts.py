"""Running experts: grouped by expert, in the family's own arithmetic, on the CPU with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch

from .errors import ConfigError

# Batch-invariant mode: a matrix product has at most this many rows, and at least as many as it
# takes for a row's bits to be the same whatever the count (found at start, see _find_min_rows).
MAX_ROWS = 64


def parse_experts(text: str, num_experts: int) -> list[int]:
    """"0-15,40" -> [0, ..., 15, 40]. Raises ConfigError for what is not a list of expert ids."""
    ids: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not is_number(first) or (dash and not is_number(last)):
            raise ConfigError(f"--experts {text!r}: {part!r} is neither a number nor a range A-B")
        begin, end = int(first), int(last) if dash else int(first)
        if begin > end or end >= num_experts:
            raise ConfigError(
                f"--experts {text!r}: {part.strip()} is not within 0-{num_experts - 1}"
            )
        ids.update(range(begin, end + 1))
    return sorted(ids)


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


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

    def forward(self, expert_idx: int, rows: torch.Tensor) -> torch.Tensor:
        """rows [N, H] -> unweighted outputs [N, H] of one held expert (index, not id)."""
        return self.forward_groups([(expert_idx, 0, rows.shape[0])], rows)

    def forward_groups(
        self, groups: Sequence[tuple[int, int, int]], rows: torch.Tensor
    ) -> torch.Tensor:
        """rows [N, H] -> unweighted outputs [N, H]; groups of (held expert, begin, end) rows.

        One product per group and projection. With more than two groups the gate runs once over
        all rows; with fewer, skipping the copies is faster.
        """
        if len(groups) == 1:
            return self._one(groups[0][0], rows)
        output = torch.empty_like(rows)
        if len(groups) == 2:
            for i, begin, end in groups:
                middle = self._gate(product(rows[begin:end], self._first[i], self._first_bias[i]))
                product(middle, self._down[i], self._down_bias[i], output[begin:end])
            return output
        middle = rows.new_empty((rows.shape[0], self._first[0].shape[1]))
        for i, begin, end in groups:
            product(rows[begin:end], self._first[i], self._first_bias[i], middle[begin:end])
        middle = self._gate(middle)
        for i, begin, end in groups:
            product(middle[begin:end], self._down[i], self._down_bias[i], output[begin:end])
        return output

    def _one(self, i: int, rows: torch.Tensor) -> torch.Tensor:
        middle = self._gate(product(rows, self._first[i], self._first_bias[i]))
        return product(middle, self._down[i], self._down_bias[i])

    def num_bytes(self) -> int:
        return sum(w.numel() * w.element_size() for w in [*self._first, *self._down])


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
        self.min_rows = self._find_min_rows()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def run(
        self, layer: int, rows: torch.Tensor, offsets: Sequence[int], batch_invariant: bool = True
    ) -> torch.Tensor:
        """Unweighted expert outputs of rows that are grouped by expert.

        rows: [N, H] in the shard's dtype, contiguous; rows offsets[i] to offsets[i + 1] belong to
        self.experts[i]. batch_invariant: every group that is not empty has at least `min_rows`
        rows (the gather kernel pads it), and goes in pieces of at most MAX_ROWS; a row's result
        then depends on the row alone. Returns [N, H].
        """
        groups = []
        for i in range(len(offsets) - 1):
            begin, end = offsets[i], offsets[i + 1]
            if begin == end:
                continue
            if batch_invariant and end - begin < self.min_rows:
                raise ConfigError(
                    f"a group of {end - begin} rows; batch-invariant mode needs {self.min_rows}"
                )
            pieces = -(-(end - begin) // MAX_ROWS) if batch_invariant else 1
            edges = [begin + (end - begin) * p // pieces for p in range(pieces + 1)]
            groups += [(i, a, b) for a, b in pairwise(edges)]
        return self.layers[layer].forward_groups(groups, rows)

    def _find_min_rows(self) -> int:
        """The least M for which products of M to MAX_ROWS rows all give a row the same bits.

        Matrix libraries promise nothing here; what is usual is one kernel for very few rows and
        another for the rest. So all counts are tried, on this shard's own first expert.
        """
        if not self.layers:
            return 1
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(MAX_ROWS, self.hidden_size, generator=generator).to(self.dtype)
        with torch.inference_mode():
            expected = self.layers[0].forward(0, rows)
            for count in range(MAX_ROWS - 1, 0, -1):
                # At the front and at the back of the batch: the place must not matter either.
                front = self.layers[0].forward(0, rows[:count])
                back = self.layers[0].forward(0, rows[-count:])
                if not (torch.equal(front, expected[:count])
                        and torch.equal(back, expected[-count:])):
                    return count + 1
        return 1


def product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows @ weight (+ bias): [N, in], [in, out], [out] -> [N, out]."""
    if bias is None:
        return torch.mm(rows, weight, out=out)
    return torch.addmm(bias, rows, weight, out=out)
