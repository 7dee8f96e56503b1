"""Running experts: grouped by expert, in the family's own arithmetic, on the CPU with torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from .errors import ConfigError

# Rows per matrix product in batch-invariant mode. Every product has exactly this many rows, so a
# row's bits depend on nothing but the row: not on how many others there are, nor on its place.
TILE_ROWS = 16


def parse_experts(text: str, num_experts: int) -> list[int]:
    """"0-15,40" -> [0, ..., 15, 40]. Raises ConfigError for what is not a list of expert ids."""
    ids: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--experts {text!r}: {part!r} is neither a number nor a range A-B")
        begin, end = int(first), int(last) if dash else int(first)
        if begin > end or end >= num_experts:
            raise ConfigError(
                f"--experts {text!r}: {part.strip()} is not within 0-{num_experts - 1}"
            )
        ids.update(range(begin, end + 1))
    return sorted(ids)


class ExpertLayer:
    """The held experts of one layer.

    module: the family's experts module, for its gate, activation and layout flags; its parameters
        are not used. parts: gate_up_proj or up_proj, down_proj, and biases, each
        [held experts, ...] in the family's layout.
    """

    def __init__(self, module: torch.nn.Module, parts: dict[str, torch.Tensor]):
        self._module = module
        self._has_gate = getattr(module, "has_gate", True)
        first = "gate_up_proj" if self._has_gate else "up_proj"
        # functional.linear wants [out, in]; a transposed family stores [in, out].
        turn = bool(getattr(module, "is_transposed", False))
        self._first = [self._linear_weight(w, turn) for w in parts[first]]
        self._down = [self._linear_weight(w, turn) for w in parts["down_proj"]]
        none = [None] * len(self._first)
        self._first_bias = list(parts.get(f"{first}_bias", none))
        self._down_bias = list(parts.get("down_proj_bias", none))

    @staticmethod
    def _linear_weight(weight: torch.Tensor, turn: bool) -> torch.Tensor:
        return weight.t().contiguous() if turn else weight

    def forward(self, expert_idx: int, rows: torch.Tensor) -> torch.Tensor:
        """rows [N, H] -> unweighted outputs [N, H] of one held expert (index, not id)."""
        middle = functional.linear(rows, self._first[expert_idx], self._first_bias[expert_idx])
        if self._has_gate:
            middle = self._module._apply_gate(middle)  # type: ignore[operator]
        else:
            middle = self._module.act_fn(middle)  # type: ignore[operator]
        return functional.linear(middle, self._down[expert_idx], self._down_bias[expert_idx])

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
        self.tile_rows = self._choose_tile()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def run(
        self, layer: int, rows: torch.Tensor, offsets: Sequence[int], batch_invariant: bool = True
    ) -> torch.Tensor:
        """Unweighted expert outputs of rows that are grouped by expert.

        rows: [N, H] in the shard's dtype; rows offsets[i] to offsets[i + 1] belong to
        self.experts[i]. batch_invariant: every product has exactly `tile_rows` rows, the last one
        padded with zeros. Returns [N, H].
        """
        experts = self.layers[layer]
        busy = [i for i in range(len(offsets) - 1) if offsets[i] != offsets[i + 1]]
        if not batch_invariant and len(busy) == 1:
            return experts.forward(busy[0], rows)
        output = torch.empty_like(rows)
        for i in busy:
            begin, end = offsets[i], offsets[i + 1]
            if batch_invariant:
                self._run_tiles(experts, i, rows[begin:end], output[begin:end], self.tile_rows)
            else:
                output[begin:end] = experts.forward(i, rows[begin:end])
        return output

    @staticmethod
    def _run_tiles(
        experts: ExpertLayer, i: int, rows: torch.Tensor, output: torch.Tensor, tile_rows: int
    ) -> None:
        for begin in range(0, rows.shape[0], tile_rows):
            part = rows[begin : begin + tile_rows]
            count = part.shape[0]
            tile = rows.new_zeros((tile_rows, rows.shape[1]))
            tile[:count] = part
            output[begin : begin + count] = experts.forward(i, tile)[:count]

    def _choose_tile(self) -> int:
        """TILE_ROWS if a row's bits are the same at every place of a tile, else 1.

        Matrix libraries promise nothing about this, so it is tried on the first layer's weights:
        each place in turn, among other rows.
        """
        if not self.layers:
            return TILE_ROWS
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(2 * TILE_ROWS, self.hidden_size, generator=generator).to(self.dtype)
        with torch.inference_mode():
            expected = self.layers[0].forward(0, rows[:TILE_ROWS])
            for shift in range(1, TILE_ROWS):
                moved = torch.cat([rows[shift:TILE_ROWS], rows[TILE_ROWS : TILE_ROWS + shift]])
                got = self.layers[0].forward(0, moved)[: TILE_ROWS - shift]
                if not torch.equal(got, expected[shift:]):
                    return 1
        return TILE_ROWS
