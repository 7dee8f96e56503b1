"""A config that hides experts or layers of its checkpoint is refused; layers that predict ahead are
not hidden."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import FAMILIES, save_model

from expertwire import transformers as integration
from expertwire.errors import CheckpointError
from expertwire.model.checkpoint import inspect_model, load_experts

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def change_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if "num_hidden_layers" in changes and config.get("layer_types"):
        changes["layer_types"] = config["layer_types"][: changes["num_hidden_layers"]]
    file.write_text(json.dumps({**config, **changes}))


def expert_count(folder: Path) -> tuple[str, int]:
    config = json.loads((folder / "config.json").read_text())
    return next((name, config[name]) for name in NUM_EXPERTS if name in config)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def whole(request, tmp_path_factory) -> Path:
    return save_model(request.param, tmp_path_factory.mktemp("larger") / request.param)


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def test_a_config_with_fewer_experts(folder):
    name, count = expert_count(folder)
    inspect_model(folder)
    change_config(folder, **{name: count - 2})
    for use in (inspect_model, lambda path: load_experts(path, [0])):
        with pytest.raises(CheckpointError, match=f"its config says {count - 2} experts"):
            use(folder)


def test_a_config_with_fewer_layers(folder):
    with_dense = json.loads((folder / "config.json").read_text()).get("first_k_dense_replace")
    changes = {"num_hidden_layers": 1, **({"first_k_dense_replace": 0} if with_dense else {})}
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=r"its config says 1 layers|tensor|incomplete"):
        inspect_model(folder)
        load_experts(folder, [0])


def add_tensors(folder: Path, layer: int, **extra: torch.Tensor) -> None:
    """A copy of the last layer as one more, and what only a layer that predicts ahead has."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    last = f"model.layers.{layer - 1}."
    copies = {name.replace(last, f"model.layers.{layer}."): tensor.clone()
              for name, tensor in tensors.items() if name.startswith(last)}
    extra = {f"model.layers.{layer}.{name.replace('__', '.')}": t for name, t in extra.items()}
    save_file({**tensors, **copies, **extra}, file, metadata={"format": "pt"})


@pytest.fixture
def deepseek(tmp_path) -> Path:
    return save_model("deepseek_v3", tmp_path / "deepseek")


def test_layers_that_predict_ahead_are_left_aside(deepseek):
    """By what the config says of them, or by tensors that only they have."""
    before = load_experts(deepseek, [3])
    add_tensors(deepseek, 2, eh_proj__weight=torch.zeros(32, 64), enorm__weight=torch.zeros(32))
    assert inspect_model(deepseek).num_layers == 1
    after = load_experts(deepseek, [3])
    assert after.num_layers == before.num_layers
    assert torch.equal(after.layers[0]._down[0], before.layers[0]._down[0])


def test_layers_ahead_that_the_config_counts(deepseek):
    change_config(deepseek, num_nextn_predict_layers=0)
    add_tensors(deepseek, 2)
    with pytest.raises(CheckpointError, match=r"2 layers, but there is model\.layers\.2\."):
        inspect_model(deepseek)
    change_config(deepseek, num_nextn_predict_layers=1)
    assert inspect_model(deepseek).num_layers == 1
    add_tensors(deepseek, 3)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\."):
        inspect_model(deepseek)


def test_layers_of_another_tower_are_not_counted(deepseek):
    (file,) = deepseek.glob("*.safetensors")
    tensors = load_file(file)
    tensors["vision.encoder.layers.30.mlp.fc.weight"] = torch.zeros(4, 4)
    tensors["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    assert inspect_model(deepseek).num_layers == 1


class NoClient:
    model_info = None

    def moe(self, *_):
        raise AssertionError("no batch is expected")


def test_a_tensor_of_another_shape_on_the_attention_side_is_named(tmp_path):
    folder = save_model("qwen3_moe", tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = torch.zeros(8, 32)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        integration.load(folder, NoClient(), dtype="float32")
    for part in (file.name, name, "[8, 32]", "[16, 32]"):
        assert part in str(caught.value)
