"""Every layout of expert tensors that transformers knows is found, and gives the right values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.families import COMMON, FAMILIES, save_model

from expertwire.errors import CheckpointError
from expertwire.model import checkpoint
from expertwire.model.checkpoint import inspect_model, load_experts, pluggable, read_config, survey
from expertwire.server.plain_experts import PLAIN_FAMILIES

# Layouts that the families of the system tests do not have: other names for experts per token,
# other names on disk, transposed, no gate, a first layer without experts.
MORE = {
    "aria_text": dict(intermediate_size=24, moe_num_experts=6, moe_topk=2),
    "ernie4_5_moe": dict(
        intermediate_size=48, moe_intermediate_size=24, moe_num_experts=6, moe_k=2,
        moe_num_shared_experts=1, moe_layer_start_index=0),
    "hunyuan_v1_moe": dict(
        intermediate_size=24, num_experts=6, moe_topk=2, head_dim=8),
    "jamba": dict(
        intermediate_size=24, num_experts=6, num_experts_per_tok=2, use_mamba_kernels=False),
    "nemotron_h": dict(
        intermediate_size=48, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2,
        n_shared_experts=1, n_group=1, topk_group=1, head_dim=8, mamba_num_heads=4,
        mamba_head_dim=16, ssm_state_size=16, n_groups=1, layers_block_type=["mamba", "moe"],
        moe_shared_expert_intermediate_size=24),
    "qwen3_5_moe_text": dict(
        moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=6,
        num_experts_per_tok=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8),
}


def save_more(model_type: str, path: Path):
    """A tiny random checkpoint of one of MORE; returns the model, or skips if there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = CONFIG_MAPPING[model_type](**{**COMMON, **MORE[model_type]})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    try:
        modules = pluggable(model)
    except CheckpointError:
        pytest.skip(f"in this transformers {model_type} has no place to plug in")
    for _, module in modules:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("model_type", sorted(MORE))
def test_other_layouts(model_type, tmp_path):
    """Held experts' weights are the module's, bit by bit; facts fit."""
    model = save_more(model_type, tmp_path / "model")
    modules = pluggable(model)
    info = inspect_model(tmp_path / "model")
    assert (info.num_experts, info.top_k, info.hidden_size) == (6, 2, 32)
    assert info.num_layers == len(modules)
    held = [1, 5]
    shard = load_experts(tmp_path / "model", held)
    for (_, module), layer in zip(modules, shard.layers, strict=True):
        first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
        for name, loaded in ((first, layer._first), ("down_proj", layer._down)):
            for i, expert in enumerate(held):
                wanted = module.get_parameter(name)[expert]
                if not module.is_transposed:
                    wanted = wanted.t()
                assert torch.equal(loaded[i], wanted)


def add_tensors(path: Path, rename) -> None:
    """Adds a zero tensor beside each for which `rename` gives another name."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    extra = {rename(n): torch.zeros_like(t) for n, t in tensors.items() if rename(n)}
    assert extra
    save_file({**tensors, **extra}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family, source, added", [
    ("qwen3_next", "model.layers.1.mlp.", "mtp.layers.0.mlp."),
    ("deepseek_v3", "model.layers.1.mlp.", "model.layers.2.mlp."),
    ("glm4_moe", "model.layers.1.mlp.", "model.layers.2.mlp."),
])
def test_layers_for_predicting_more_tokens_are_left_alone(family, source, added, tmp_path):
    """Published checkpoints hold an extra layer with experts of its own, which no model loads."""
    path = save_model(family, tmp_path / "model")
    before = load_experts(path, [1, 3])
    num_layers = inspect_model(path).num_layers
    add_tensors(path, lambda n: n.replace(source, added) if n.startswith(source) else None)
    after = load_experts(path, [1, 3])
    assert inspect_model(path).num_layers == num_layers == after.num_layers
    for old, new in zip(before.layers, after.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old._first, new._first, strict=True))


def test_shared_experts_are_no_experts(tmp_path):
    path = save_model("deepseek_v2", tmp_path / "model")
    found = survey(path, read_config(path))
    names = [place.name for layer in found.places for place in layer.values()]
    assert names and not [n for n in names if "shared" in n]
    assert len(names) == 2 * 8 * 3


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe"])
def test_fused_tensors_are_told_from_single_ones(family, tmp_path):
    path = save_model(family, tmp_path / "model")
    found = survey(path, read_config(path))
    fused = {place.fused for layer in found.places for place in layer.values()}
    assert fused == {family in ("gpt_oss", "granitemoe")}


def test_fused_tensors_of_a_family_that_has_single_ones(tmp_path):
    """A folder saved by a model in transformers' own layout, as fine-tuning tools may do."""
    path = save_model("qwen3_moe", tmp_path / "model")
    expected = load_experts(path, [2, 6])
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    got = load_experts(path, [2, 6])
    for a, b in zip(expected.layers, got.layers, strict=True):
        for x, y in zip([*a._first, *a._down], [*b._first, *b._down], strict=True):
            assert torch.equal(x, y)


@pytest.fixture
def turned(tmp_path, monkeypatch):
    """A qwen3_moe folder whose experts lie transposed, two ways, and a mapping that says so."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

    def mapping(_: str):
        return [
            WeightConverter(
                ["mlp.experts.turned_first"], ["mlp.experts.gate_up_proj"],
                [Transpose(1, 2, check_dims=True)],
            ),
            WeightConverter(
                ["mlp.experts.*.turned_down.weight"], ["mlp.experts.down_proj"],
                [MergeModulelist(dim=0), Transpose(1, 2)],
            ),
        ]

    path = save_model("qwen3_moe", tmp_path / "model")
    whole = load_experts(path, None)
    real = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping, "get_checkpoint_conversion_mapping",
        lambda kind: mapping(kind) if kind == "qwen3_moe" else real(kind),
    )
    tensors = load_file(path / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if ".experts." not in n}
    for i, layer in enumerate(whole.layers):
        prefix = f"model.layers.{i}.mlp.experts"
        tensors[f"{prefix}.turned_first"] = torch.stack(list(layer._first)).contiguous()
        for e, weight in enumerate(layer._down):
            tensors[f"{prefix}.{e}.turned_down.weight"] = weight.contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path, whole


def test_converters_run_for_one_expert_at_a_time(turned):
    """The same values as from a folder that needs no converting."""
    path, whole = turned
    shard = load_experts(path, [0, 4, 6])
    for a, b in zip(whole.layers, shard.layers, strict=True):
        for i, expert in enumerate(shard.experts):
            assert torch.equal(a._first[expert], b._first[i])
            assert torch.equal(a._down[expert], b._down[i])


@pytest.mark.parametrize("part", ["turned_first", "4.turned_down.weight"])
def test_a_tensor_that_does_not_convert_is_named(turned, part):
    path, _ = turned
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.experts.{part}"
    tensors[name] = tensors[name][..., :-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} has shape"):
        load_experts(path, [4])


def test_every_family_of_the_system_tests_is_found(tmp_path):
    for family in FAMILIES:
        info = inspect_model(save_model(family, tmp_path / family))
        assert info.model_type == family and info.hidden_size == 32


@pytest.mark.parametrize("family", sorted(PLAIN_FAMILIES))
def test_plain_families_need_no_modelling_code(family, tmp_path, monkeypatch):
    """Importing it takes seconds, which a starting server would wait for."""
    path = save_model(family, tmp_path / "model")

    def refuse(_):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "plain_layers", lambda *_: None)
        slow = survey(path, read_config(path))
    monkeypatch.setattr(checkpoint, "build_model", refuse)
    fast = survey(path, read_config(path))
    assert len(fast.modules) == len(slow.modules) and slow.model is not None
    for (_, a), (_, b) in zip(fast.modules, slow.modules, strict=True):
        shapes = {name: p.shape for name, p in a.named_parameters()}
        assert shapes == {name: p.shape for name, p in b.named_parameters()}
    for a, b in zip(fast.places, slow.places, strict=True):
        assert sorted(p.name for p in a.values()) == sorted(p.name for p in b.values())
