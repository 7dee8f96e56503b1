"""Reading checkpoint folders: whole ones give the right bytes, damaged ones a useful error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.families import COMMON, FAMILIES, make_model, save_model

from expertwire import transformers as integration
from expertwire.errors import CheckpointError, ConfigError
from expertwire.model import checkpoint
from expertwire.model.checkpoint import (
    INDEX,
    inspect_model,
    load_experts,
    read_config,
    weight_files,
)

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sound qwen3_moe folder of several shards: 7 experts, 2 layers."""
    path = tmp_path_factory.mktemp("whole") / "model"
    make_model("qwen3_moe").save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "model")


def file_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def rewrite(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


class NoClient:
    """Stands in for a client where loading must fail, or succeed, before any batch."""

    model_info = None

    def moe(self, *_):
        raise AssertionError("no batch is expected")


# ---------------------------------------------------------------- whole checkpoints


def test_inspect(whole, tmp_path):
    info = inspect_model(whole)
    assert (info.name, info.model_type) == ("model", "qwen3_moe")
    assert (info.num_layers, info.num_experts, info.hidden_size, info.top_k) == (2, 7, 32, 3)
    assert info.dtype == "float32"
    assert json.loads(json.dumps(info.as_dict())) == info.as_dict()


def test_fingerprint_tells_models_apart_but_not_folders(whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "elsewhere")
    assert inspect_model(copy).fingerprint == inspect_model(whole).fingerprint
    rewrite(file_of(copy, EXPERT), lambda t: t[EXPERT].mul_(2))
    assert inspect_model(copy).fingerprint != inspect_model(whole).fingerprint


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_value_arrives(family, tmp_path):
    """Each held expert's weights are the model's own, whatever the layout on disk."""
    path = save_model(family, tmp_path / family)
    wanted = [5, 0, 2]
    shard = load_experts(path, wanted)
    modules = checkpoint.pluggable(make_model(family))
    assert shard.experts == [0, 2, 5] and shard.num_layers == len(modules)
    for layer, (_, module) in zip(shard.layers, modules, strict=True):
        first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
        for held, name in ((layer._first, first), (layer._down, "down_proj")):
            for weight, expert in zip(held, shard.experts, strict=True):
                expected = getattr(module, name)[expert]
                same = weight if weight.shape == expected.shape else weight.t()
                assert torch.equal(same, expected)
        biases = [b for b in [*layer._first_bias, *layer._down_bias] if b is not None]
        assert len(biases) == (2 * len(wanted) if family == "gpt_oss" else 0)


def test_dtype_and_progress(whole):
    seen: list[tuple[int, int]] = []
    shard = load_experts(whole, [1, 2], dtype="bfloat16", progress=lambda *s: seen.append(s))
    assert shard.dtype == torch.bfloat16
    bytes_held = sum(layer.num_bytes() for layer in shard.layers)
    assert seen[-1] == (bytes_held, bytes_held)
    assert [s[0] for s in seen] == sorted(s[0] for s in seen)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_only_the_wanted_experts_are_read(family, tmp_path, monkeypatch):
    """Counts what leaves the files, tensor by tensor and slice by slice."""
    path = save_model(family, tmp_path / family)
    num_experts = inspect_model(path).num_experts
    read: list[tuple[str, int | None, int]] = []

    class Slice:
        def __init__(self, name, real):
            self.name, self.real = name, real

        def get_shape(self):
            return self.real.get_shape()

        def get_dtype(self):
            return self.real.get_dtype()

        def __getitem__(self, key):
            data = self.real[key]
            read.append((self.name, key, data.numel()))
            return data

    class Weights:
        def __init__(self, real):
            self.real = real

        def keys(self):
            return self.real.keys()

        def get_slice(self, name):
            return Slice(name, self.real.get_slice(name))

        def get_tensor(self, name):
            data = self.real.get_tensor(name)
            read.append((name, None, data.numel()))
            return data

    real_open = checkpoint.open_weights

    @checkpoint.contextlib.contextmanager
    def counting(file):
        with real_open(file) as tensors:
            yield Weights(tensors)

    monkeypatch.setattr(checkpoint, "open_weights", counting)
    load_experts(path, [2])
    assert read
    for name, key, _ in read:
        assert key == 2 if key is not None else ".experts.2." in name
    everything = sum(
        p.numel() for _, m in checkpoint.pluggable(make_model(family)) for p in m.parameters()
    )
    assert sum(count for *_, count in read) * num_experts == everything


@pytest.mark.parametrize("experts", [[7], [-1], [0, 99], []], ids=str)
def test_experts_that_do_not_exist(whole, experts):
    with pytest.raises(ConfigError, match="numbered from 0"):
        load_experts(whole, experts)


# ---------------------------------------------------------------- damaged checkpoints


def both_loads_fail(folder: Path, match: str) -> None:
    """Server and attention side refuse the folder, each with the reason."""
    with pytest.raises(CheckpointError, match=match):
        load_experts(folder, [3])
    with pytest.raises(CheckpointError, match=match):
        integration.load(folder, NoClient())


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -100, -1])
def test_truncated_file(folder, keep):
    file = file_of(folder, EXPERT)
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    both_loads_fail(folder, file.name)


def test_garbage_header(folder):
    file = file_of(folder, EXPERT)
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(bytes(data))
    both_loads_fail(folder, file.name)


def test_header_length_of_terabytes(folder):
    file = file_of(folder, EXPERT)
    data = bytearray(file.read_bytes())
    data[:8] = (1 << 45).to_bytes(8, "little")
    file.write_bytes(bytes(data))
    both_loads_fail(folder, file.name)


def test_missing_shard(folder):
    file = file_of(folder, EXPERT)
    file.unlink()
    both_loads_fail(folder, file.name)


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "\x00\x01", "null",
])
def test_bad_index(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        weight_files(folder)
    both_loads_fail(folder, "index")


def test_missing_expert_tensor(folder):
    rewrite(file_of(folder, EXPERT), lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(CheckpointError, match=r"layer 1 has no up_proj of expert 3"):
        load_experts(folder, [3])
    load_experts(folder, [2])  # whoever does not need it is not bothered


def test_wrong_shape(folder):
    def shorten(tensors):
        tensors[EXPERT] = tensors[EXPERT][:-1].contiguous()

    rewrite(file_of(folder, EXPERT), shorten)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.up_proj.*\[23, 32\]"):
        load_experts(folder, [3])


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8, torch.float64], ids=str)
def test_weights_of_another_kind(folder, kind):
    """Quantised weights without their scales would be silently wrong."""
    def convert(tensors):
        tensors[EXPERT] = tensors[EXPERT].to(kind)

    rewrite(file_of(folder, EXPERT), convert)
    with pytest.raises(CheckpointError, match=rf"experts\.3\.up_proj\.weight is {kind}"):
        load_experts(folder, [3])


def test_quantised_checkpoint_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    both_loads_fail(folder, "quantised")


def test_layer_without_experts(folder):
    def drop(tensors):
        for name in [n for n in tensors if ".layers.1." in n and ".experts." in n]:
            del tensors[name]

    for file in weight_files(folder):
        rewrite(file, drop)
    with pytest.raises(CheckpointError, match="1 layers have expert tensors, the config says 2"):
        load_experts(folder, [0])


def test_attention_side_tensor_is_missing(folder):
    name = "model.layers.1.self_attn.q_proj.weight"
    rewrite(file_of(folder, name), lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj"):
        integration.load(folder, NoClient())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no-such"}', "{}"])
def test_bad_config(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(folder)
    both_loads_fail(folder, "config")


@pytest.mark.parametrize("top_k", [0, -1, 99])
def test_more_experts_per_token_than_there_are(folder, top_k):
    config = json.loads((folder / "config.json").read_text())
    config["num_experts_per_tok"] = top_k
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"asks for {top_k} of \d+ experts"):
        inspect_model(folder)


def test_folders_that_are_no_checkpoints(tmp_path, whole):
    with pytest.raises(CheckpointError, match="is not a folder"):
        inspect_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a folder"):
        inspect_model(whole / "config.json")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        inspect_model(tmp_path)
    shutil.copy(whole / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no safetensors files"):
        inspect_model(tmp_path)


def test_dense_model_is_refused(tmp_path):
    config = transformers.LlamaConfig(**COMMON, intermediate_size=48)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="Mixture-of-Experts"):
        inspect_model(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be served"):
        integration.load(tmp_path, NoClient())
