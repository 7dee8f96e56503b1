"""Running experts: ids, layouts, and that a row's bits depend on the row alone."""

from __future__ import annotations

import pytest
import torch
from tests.families import FAMILIES, make_model, save_model

from expertwire.errors import ConfigError
from expertwire.model.checkpoint import load_experts, pluggable
from expertwire.model.config_file import parse_experts
from expertwire.server.experts import MAX_ROWS, ExpertLayer, ExpertShard, threads
from expertwire.server.plain_experts import PlainExperts

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("text, expected", [
    ("0", [0]), ("0-3", [0, 1, 2, 3]), ("5,1", [1, 5]), ("0-2,2-4,7", [0, 1, 2, 3, 4, 7]),
    (" 1 , 3-4 ", [1, 3, 4]), ("7-7", [7]),
])
def test_parse_experts(text, expected):
    assert parse_experts(text, 8) == expected


@pytest.mark.parametrize("text", [
    "", ",", "1,", "a", "-1", "1-", "-", "3-1", "8", "0-8", "1-2-3", "1.5", "0x1", "\u00b2", "1 2",
])
def test_parse_experts_refuses(text):
    with pytest.raises(ConfigError, match="--experts"):
        parse_experts(text, 8)


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "granitemoe"])
def folder(request, tmp_path_factory):
    return save_model(request.param, tmp_path_factory.mktemp("experts") / request.param)


def run_padded(
    shard: ExpertShard, groups: dict[int, torch.Tensor], *, front: bool = False, layer: int = 0,
    filler: float = 0.0, batch_invariant: bool = True,
) -> dict[int, torch.Tensor]:
    """Runs {expert index: rows [N, H]}, each group filled up to min_rows, as a server does it."""
    parts, offsets, places = [], [0], {}
    for i in range(len(shard.experts)):
        rows = groups.get(i)
        if rows is not None and len(rows):
            missing = max(0, shard.min_rows - len(rows)) if batch_invariant else 0
            padding = torch.full((missing, rows.shape[1]), filler, dtype=rows.dtype)
            parts += [padding, rows] if front else [rows, padding]
            begin = offsets[-1] + (missing if front else 0)
            places[i] = (begin, begin + len(rows))
            offsets.append(offsets[-1] + len(rows) + missing)
        else:
            offsets.append(offsets[-1])
    with torch.inference_mode():
        out = shard.run(layer, torch.cat(parts), offsets, batch_invariant)
    return {i: out[a:b] for i, (a, b) in places.items()}


def random_rows(count: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_batch(folder, dtype):
    """One row among others: other counts, other places, other neighbours, other experts busy."""
    shard = load_experts(folder, [1, 2, 4], dtype=dtype)
    hidden = shard.hidden_size
    row = random_rows(1, hidden, dtype, seed=99)
    for layer in range(shard.num_layers):
        alone = run_padded(shard, {1: row}, layer=layer)[1][0]
        for count in [2, 3, 5, 16, 17, MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS + 3]:
            others = random_rows(count, hidden, dtype, seed=count) * 10
            for place in sorted({0, 1, count // 2, count - 1}):
                rows = others.clone()
                rows[place] = row
                groups = {0: others[: count // 2 + 1], 1: rows, 2: others[:1]}
                got = run_padded(shard, groups, layer=layer, front=bool(place % 2), filler=3.0)
                assert torch.equal(got[1][place], alone), f"{count} rows, place {place}"


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_plain_mode_agrees_within_rounding(folder, dtype, bound):
    shard = load_experts(folder, [0, 3], dtype=dtype)
    groups = {0: random_rows(1, shard.hidden_size, dtype), 1: random_rows(70, shard.hidden_size,
                                                                          dtype, seed=1)}
    invariant = run_padded(shard, groups)
    plain = run_padded(shard, groups, batch_invariant=False)
    for i in groups:
        difference = (invariant[i] - plain[i]).abs().max()
        assert difference <= bound * invariant[i].abs().max()


def test_too_small_a_group_is_refused(folder):
    """A caller that forgets the padding would lose the promise without noticing."""
    shard = load_experts(folder, [0])
    if shard.min_rows == 1:
        pytest.skip("this machine's matrix library needs no padding here")
    with pytest.raises(ConfigError, match="batch-invariant"):
        shard.run(0, random_rows(1, shard.hidden_size, shard.dtype), [0, 1], True)


def test_no_rows_at_all(folder):
    shard = load_experts(folder, [0, 1])
    empty = torch.empty(0, shard.hidden_size)
    assert shard.run(0, empty, [0, 0, 0], False).shape == (0, shard.hidden_size)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_against_the_family_module(family, tmp_path):
    """Each held expert of each layer gives what transformers' own module gives for it alone."""
    path = save_model(family, tmp_path / family)
    model = make_model(family)
    model.set_experts_implementation("eager")
    modules = pluggable(model)
    held = [4, 1]
    shard = load_experts(path, held)
    assert shard.experts == sorted(held) and shard.num_layers == len(modules)
    rows = random_rows(9, shard.hidden_size, torch.float32)
    for layer, (_, module) in enumerate(modules):
        for i, expert in enumerate(shard.experts):
            ids = torch.full((len(rows), 1), expert)
            with torch.inference_mode():
                expected = module(rows, ids, torch.ones(len(rows), 1))
            got = run_padded(shard, {i: rows}, layer=layer)[i]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_biases_of_gpt_oss_count(tmp_path):
    """Each bias of an expert moves exactly that expert's results."""
    path = save_model("gpt_oss", tmp_path / "gpt_oss")
    rows = random_rows(6, 32, torch.float32)
    for part in ("_first_bias", "_down_bias"):
        shard = load_experts(path, [2, 5])
        before = run_padded(shard, {0: rows, 1: rows})
        biases = getattr(shard.layers[0], part)
        assert all(bias is not None and bias.abs().max() > 0 for bias in biases)
        biases[1] = biases[1] + 0.25
        after = run_padded(shard, {0: rows, 1: rows})
        assert torch.equal(before[0], after[0])
        assert not torch.allclose(before[1], after[1], atol=1e-3)


class SigmoidExperts(PlainExperts):
    """A family with a gate of its own, whose steps run over whole batches at once."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.sigmoid(gate * 1.5) * up


def random_shard(kind: type[PlainExperts], hidden: int, inner: int) -> ExpertShard:
    """Four fp32 experts of any size."""
    generator = torch.Generator().manual_seed(3)
    parts = {
        "gate_up_proj": torch.randn(4, 2 * inner, hidden, generator=generator) / hidden**0.5,
        "down_proj": torch.randn(4, hidden, inner, generator=generator) / inner**0.5,
    }
    return ExpertShard([ExpertLayer(kind(4, hidden, inner), parts)], range(4), hidden,
                       torch.float32)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("kind, hidden, inner", [
    (PlainExperts, 96, 1000), (PlainExperts, 64, 24), (SigmoidExperts, 64, 21),
    (SigmoidExperts, 33, 1030),
])
def test_bits_with_odd_widths_and_threads(kind, hidden, inner, num_threads):
    """Threads and SIMD both cut tensors somewhere: never where it depends on the batch."""
    with threads(num_threads):
        shard = random_shard(kind, hidden, inner)
        rows = random_rows(200, hidden, torch.float32)
        alone = [[run_padded(shard, {e: rows[r : r + 1]})[e][0] for r in range(200)]
                 for e in range(2)]
        for count in [1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 129, 200]:
            for groups in ({0: rows[:count]}, {0: rows[:count], 1: rows[-count:]},
                           {0: rows[:count], 1: rows[-count:], 3: rows[:7]}):
                got = run_padded(shard, groups)
                assert all(torch.equal(got[0][r], alone[0][r]) for r in range(count))
                if 1 in groups:
                    assert all(
                        torch.equal(got[1][-r], alone[1][-r]) for r in range(1, count + 1)
                    )


def test_a_library_that_cuts_every_count_differently(monkeypatch):
    """No range of counts is left: one thread is tried, then every row is a product of its own."""
    seen = []

    def useless(_):
        seen.append(torch.get_num_threads())
        return MAX_ROWS

    monkeypatch.setattr(ExpertShard, "_find_min_rows", useless)
    with threads(3):
        shard = random_shard(PlainExperts, 16, 32)
        rows = random_rows(5, 16, torch.float32)
        out = shard.run(0, rows, [0, 0, 5, 5, 5], True)
        assert seen == [3, 1] and shard.min_rows == 1 and torch.get_num_threads() == 3
    with threads(1):
        each = [shard.layers[0].forward(1, row.unsqueeze(0))[0] for row in rows]
    assert all(torch.equal(a, b) for a, b in zip(out, each, strict=True))


def test_the_self_check_uses_the_threads_of_the_first_look():
    """A server sets its threads after loading; what is found before would not hold."""
    with threads(2):
        shard = random_shard(PlainExperts, 16, 32)
    with threads(1):
        assert shard._limits[2] == 1
