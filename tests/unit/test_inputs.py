"""What a caller may hand to `moe`, and the words for what does not fit."""

from __future__ import annotations

import pytest
import torch

from expertwire.client.inputs import InputCheck
from expertwire.errors import ConfigError

CHECK = InputCheck(
    {"name": "m", "dtype": "float32", "hidden_size": 4, "num_layers": 2, "top_k": 2}, 2
)
HIDDEN, IDS, WEIGHTS = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)

BAD = {
    "a list": (0, HIDDEN.tolist(), IDS, WEIGHTS, r"hidden must be a torch tensor \[T, 4\] float32"),
    "an array": (0, HIDDEN.numpy(), IDS, WEIGHTS, "hidden must be a torch tensor .* not ndarray"),
    "None": (0, None, IDS, WEIGHTS, "hidden must be a torch tensor .* not NoneType"),
    "ids as a list": (0, HIDDEN, IDS.tolist(), WEIGHTS, "topk_ids must be a torch tensor"),
    "ids as an array": (0, HIDDEN, IDS.numpy(), WEIGHTS, "topk_ids must be .* not ndarray"),
    "weights as a number": (0, HIDDEN, IDS, 0.5, "topk_weights must be a torch tensor .* float"),
    "a layer by name": ("0", HIDDEN, IDS, WEIGHTS, "layer must be a whole number, not str"),
    "half a layer": (0.5, HIDDEN, IDS, WEIGHTS, "layer must be a whole number, not float"),
    "no layer": (None, HIDDEN, IDS, WEIGHTS, "layer must be a whole number, not NoneType"),
    "layer 2": (2, HIDDEN, IDS, WEIGHTS, "layer 2 does not exist"),
    "layer -1": (-1, HIDDEN, IDS, WEIGHTS, "layer -1 does not exist"),
    "one row": (0, HIDDEN[0], IDS, WEIGHTS, r"hidden must be \[T, 4\] for m, not \[4\]"),
    "narrow": (0, HIDDEN[:, :3], IDS, WEIGHTS, r"not \[3, 3\]"),
    "half precision": (0, HIDDEN.half(), IDS, WEIGHTS, "--dtype float16"),
    "complex": (0, HIDDEN.to(torch.complex64), IDS, WEIGHTS, "hidden is torch.complex64"),
    "nowhere": (0, HIDDEN.to("meta"), IDS, WEIGHTS, "hidden is on meta"),
    "sparse": (0, HIDDEN.to_sparse(), IDS, WEIGHTS, "hidden must be a dense tensor"),
    "short ids": (0, HIDDEN, IDS[:2], WEIGHTS[:2], r"must both be \[3, K\]"),
    "flat ids": (0, HIDDEN, IDS[:, 0], WEIGHTS[:, 0], r"must both be \[3, K\]"),
    "fewer weights": (0, HIDDEN, IDS, WEIGHTS[:, :1], r"must both be \[3, K\]"),
    "float ids": (0, HIDDEN, IDS.float(), WEIGHTS, "topk_ids must be int64 or int32"),
    "int weights": (0, HIDDEN, IDS, WEIGHTS.int(), "topk_weights must be floating point"),
    "no experts": (0, HIDDEN, IDS[:, :0], WEIGHTS[:, :0], "0 experts per token"),
    "too many": (0, HIDDEN, IDS.repeat(1, 2), WEIGHTS.repeat(1, 2), "4 experts per token"),
}


@pytest.mark.parametrize("layer, hidden, ids, weights, words", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_named(layer, hidden, ids, weights, words):
    with pytest.raises(ConfigError, match=words):
        CHECK(layer, hidden, ids, weights)


@pytest.mark.parametrize("hidden, ids, weights", [
    (HIDDEN, IDS, WEIGHTS), (HIDDEN[:0], IDS[:0], WEIGHTS[:0]),
    (HIDDEN, IDS.int(), WEIGHTS.bfloat16()), (HIDDEN.t().contiguous().t(), IDS, WEIGHTS),
])
def test_what_fits(hidden, ids, weights):
    CHECK(1, hidden, ids, weights)
    CHECK(True, hidden, ids, weights)
