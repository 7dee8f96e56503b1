"""Reading Hugging Face MoE checkpoints: what is in a folder, and only the experts one wants.

Weights stay on disk in the layout their family publishes: one tensor per expert and projection, or
one tensor for all experts of a layer (weight_map.py knows which). Either way only the wanted
experts' bytes are read, through safetensors' memory map.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, ConfigError
from ..message import dtype_of
from ..server.experts import ExpertLayer, ExpertShard
from ..server.plain_experts import plain_layers
from .checkpoint_facts import refuse_larger_checkpoint, top_k_of
from .config_file import checkpoint_folder
from .weight_map import Key, TensorMap, WeightMap, parameter_sizes

INDEX = "model.safetensors.index.json"
FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
WEIGHT_TYPES = tuple(FILE_DTYPES.values())
SAMPLE_BYTES = 1 << 16  # of each file's data, at both ends, for the fingerprint


@dataclass(frozen=True)
class ModelInfo:
    """A MoE model's facts. Layers are its MoE layers only, numbered from 0."""

    fingerprint: str
    name: str
    model_type: str
    num_layers: int
    num_experts: int
    hidden_size: int
    top_k: int
    dtype: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TensorPlace:
    """Where an expert's tensor is: file and name, or a slice of a tensor for all experts."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, F16
    fused: bool


@dataclass(frozen=True)
class Survey:
    """What is where in a checkpoint folder.

    modules: (name, experts module on the meta device) of each MoE layer. places: of each MoE
    layer, which tensor holds what.
    """

    modules: list[tuple[str, torch.nn.Module]]
    weight_map: TensorMap
    places: list[dict[Key, TensorPlace]]
    names: Collection[str]  # of all tensors in the files
    model: Any = None  # on the meta device; None if the modelling code was not needed


def read_config(path: str | Path) -> Any:
    """The folder's transformers config. Raises CheckpointError if it has none or it is damaged."""
    folder = checkpoint_folder(path)
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(folder))
    except Exception as err:
        raise CheckpointError(f"{folder / 'config.json'}: {err}") from err
    if getattr(config, "quantization_config", None):
        raise CheckpointError(
            f"{folder} is quantised (quantization_config in config.json), which is not supported: "
            "expert weights must be float32, bfloat16 or float16"
        )
    return config.get_text_config()


def weight_files(path: str | Path) -> list[Path]:
    """The folder's safetensors files. Raises CheckpointError if one is missing."""
    folder = Path(path)
    index = folder / INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{folder} has no safetensors files")
        return found
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not all(isinstance(name, str) for name in names):
            raise ValueError("file names must be strings")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as err:
        raise CheckpointError(f"{index} cannot be read: {err!r}") from err
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {INDEX} names {name}, which is not there")
    return [folder / name for name in names]


@contextlib.contextmanager
def open_weights(file: Path) -> Generator[Any]:
    """A memory-mapped safetensors file; damage becomes CheckpointError naming it."""
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as err:
        raise CheckpointError(f"{file} is damaged: {err}; fetch the checkpoint again") from err


class WeightReader(contextlib.ExitStack):
    """Reads tensors of several files, each opened (and its header parsed) once.

    What was read stays in the mapped pages until the reader is closed, so one reader serves one
    layer: the memory a load needs on top of the weights it keeps is a layer's share, not all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, Any] = {}

    def read(self, place: TensorPlace, expert: int, shape: tuple[int, ...] | None) -> torch.Tensor:
        """One expert's tensor, from the map; of this shape, unless that is not known (None).

        Raises CheckpointError naming file and tensor.
        """
        if place.file not in self._open:
            self._open[place.file] = self.enter_context(open_weights(place.file))
        tensors = self._open[place.file]
        try:
            data = (tensors.get_slice(place.name)[expert] if place.fused
                    else tensors.get_tensor(place.name))
        except (SafetensorError, OSError, IndexError) as err:
            raise CheckpointError(f"{place.file}: tensor {place.name}: {err}") from err
        if shape is not None and tuple(data.shape) != shape:
            raise CheckpointError(
                f"{place.file}: tensor {place.name} has shape {list(place.shape)}, expected "
                f"{['experts', *shape] if place.fused else list(shape)}"
            )
        if data.dtype not in WEIGHT_TYPES:
            raise CheckpointError(
                f"{place.file}: tensor {place.name} is {data.dtype}: expert weights must be "
                "float32, bfloat16 or float16"
            )
        return data


def survey(path: str | Path, config: Any) -> Survey:
    """Finds every expert tensor, from the files' headers only.

    The modelling code, which takes seconds to import, is built (on the meta device) only for
    families and layouts that plain_experts.py does not know. Raises CheckpointError for a damaged
    file, or a family that cannot be served.
    """
    headers: dict[str, TensorPlace] = {}
    for file in weight_files(path):
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                part = tensors.get_slice(name)
                headers[name] = TensorPlace(
                    file, name, tuple(part.get_shape()), part.get_dtype(), False
                )
    plain, model = plain_layers(config, headers), None
    if plain is not None:
        modules, weight_map = plain
    else:
        model = build_model(config)
        modules = pluggable(model)
        weight_map = WeightMap(model, modules)
    places: list[dict[Key, TensorPlace]] = [{} for _ in modules]
    for name, (layer, key) in weight_map.find(headers).items():
        places[layer][key] = dataclasses.replace(headers[name], fused=key.expert < 0)
    num_found = sum(bool(layer) for layer in places)
    if not num_found:
        raise CheckpointError(
            f"{path}: no expert tensors of a layout that transformers knows for model type "
            f"{config.model_type!r}"
        )
    if num_found < len(modules):
        raise CheckpointError(
            f"{path}: {num_found} layers have expert tensors, the config says {len(modules)}"
        )
    return Survey(modules, weight_map, places, headers.keys(), model)


def fingerprint(path: str | Path) -> str:
    """Tells models apart: config, tensor names and shapes, and samples of the weights."""
    digest = hashlib.sha256()
    config = json.loads((Path(path) / "config.json").read_text())
    config.pop("transformers_version", None)
    config.pop("experts_implementation", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in weight_files(path):
        size = file.stat().st_size
        with file.open("rb") as raw:
            header = int.from_bytes(raw.read(8), "little")
            digest.update(raw.read(min(header, size) + SAMPLE_BYTES))
            raw.seek(max(0, size - SAMPLE_BYTES))
            digest.update(raw.read())
    return digest.hexdigest()[:32]


def inspect_model(path: str | Path) -> ModelInfo:
    """What a checkpoint folder holds, from its config and the files' headers.

    Raises CheckpointError for a folder that is no MoE checkpoint, or a damaged one.
    """
    config = read_config(path)
    return _info(path, config, survey(path, config))


def _info(path: str | Path, config: Any, found: Survey) -> ModelInfo:
    sizes = {parameter_sizes(module) for _, module in found.modules}
    if len(sizes) > 1:
        raise CheckpointError(
            f"model type {config.model_type!r} cannot be served: its MoE layers differ in number "
            f"of experts or size: {sorted(sizes)}"
        )
    ((num_experts, hidden_size),) = sizes
    refuse_larger_checkpoint(path, config, num_experts, found.places, found.names)
    if not 1 <= (top_k := top_k_of(found.model, config)) <= num_experts:
        raise CheckpointError(f"{path}: its config asks for {top_k} of {num_experts} experts")
    dtype = config.dtype  # older configs do not say
    if not isinstance(dtype, torch.dtype):
        dtype = FILE_DTYPES.get(next(iter(found.places[0].values())).dtype, torch.float32)
    return ModelInfo(fingerprint(path), Path(path).resolve().name, config.model_type,
                     len(found.modules), num_experts, hidden_size, top_k, str(dtype).split(".")[1])


def build_model(config: Any) -> Any:
    """The model on the meta device: structure and shapes, no memory. Raises CheckpointError."""
    import transformers

    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as err:
        raise CheckpointError(
            f"transformers cannot build model type {config.model_type!r}: {err}"
        ) from err


def expert_modules(config: Any) -> list[tuple[str, torch.nn.Module]]:
    """(name, experts module) of each MoE layer, in order, on the meta device.

    Raises CheckpointError for a family whose experts cannot be replaced.
    """
    return pluggable(build_model(config))


def pluggable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The experts modules of a model. Raises CheckpointError, with the reason, if it has none."""
    found = [
        (name, module) for name, module in model.named_modules()
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    ]
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if not found:
        raise CheckpointError(
            f"model type {kind!r} cannot be served: it is no Mixture-of-Experts model, or its "
            "experts do not use transformers' experts interface (they are computed inside the "
            "model's own code), so there is no place to plug in; see the families in the README"
        )
    if any(getattr(module, "has_post_expert_norm", False) for _, module in found):
        raise CheckpointError(
            f"model type {kind!r} cannot be served: it normalises after each expert, which the "
            "experts interface does not expose to a server"
        )
    return found


def load_experts(
    path: str | Path, experts: Sequence[int] | None = None, *,
    dtype: str | torch.dtype | None = None, progress: Callable[[int, int], None] | None = None,
) -> ExpertShard:
    """Loads some experts (None: all) of every MoE layer.

    dtype: of the weights in memory; default as the checkpoint says. progress(done, total) gets
    bytes. Raises CheckpointError naming file and tensor, ConfigError for ids that do not exist.
    """
    layers, ids, info = load_parts(path, experts, dtype=dtype, progress=progress)
    loaded = [ExpertLayer(module, parts) for module, parts in layers]
    return ExpertShard(loaded, ids, info.hidden_size, dtype_of(info.dtype))


def load_parts(
    path: str | Path, experts: Sequence[int] | None, *, dtype: str | torch.dtype | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[tuple[Any, dict[str, torch.Tensor]]], list[int], ModelInfo]:
    """(each layer's module and parameters, ids, facts with the dtype), as `load_experts` says."""
    config = read_config(path)
    found = survey(path, config)
    info = _info(path, config, found)
    wanted = sorted(set(range(info.num_experts) if experts is None else experts))
    bad = [e for e in wanted if not 0 <= e < info.num_experts]
    if bad or not wanted:
        raise ConfigError(
            f"experts {bad or 'none'} of {info.name}: it has {info.num_experts}, numbered from 0"
        )
    kind = dtype_of(info.dtype) if dtype is None else dtype
    target = dtype_of(kind) if isinstance(kind, str) else kind
    total = sum(_layer_elements(m) for _, m in found.modules) * target.itemsize
    total = total * len(wanted) // info.num_experts
    done = 0
    loaded = []
    for layer, (_, module) in enumerate(found.modules):
        parts = {}
        with WeightReader() as reader:
            for name, parameter in list(module.named_parameters()):
                parts[name] = _load_parameter(
                    reader, path, found, layer, name, tuple(parameter.shape[1:]), wanted, target
                )
                done += parts[name].numel() * target.itemsize
                if progress is not None:
                    progress(done, total)
        for name in parts:
            delattr(module, name)
        loaded.append((module, parts))
    return loaded, wanted, dataclasses.replace(info, dtype=str(target).removeprefix("torch."))


def _layer_elements(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _load_parameter(
    reader: WeightReader, path: str | Path, found: Survey, layer: int, name: str,
    shape: tuple[int, ...], wanted: list[int], dtype: torch.dtype,
) -> torch.Tensor:
    """One fused parameter, the wanted experts' rows of it: [len(wanted), *shape]."""
    places = found.places[layer]
    part = next((key.part for key in places if key.parameter == name), "")
    parts = found.weight_map.parts(part)
    stacked = found.weight_map.is_stacked(part)
    out = torch.empty((len(wanted), *shape), dtype=dtype)
    for i, expert in enumerate(wanted):
        here = [
            places.get(Key(name, p, expert)) or places.get(Key(name, p, -1)) for p in parts
        ]
        for p, place in zip(parts, here, strict=True):
            if place is None:
                raise CheckpointError(
                    f"{path}: layer {layer} has no {found.weight_map.part_name(p, name)} of expert "
                    f"{expert} ({found.modules[layer][0]}); the checkpoint is incomplete"
                )
        known = [place for place in here if place is not None]
        if stacked:  # straight from the map: [gate; up], say, or a single tensor
            half = (shape[0] // len(parts), *shape[1:])
            for target, place in zip(out[i].chunk(len(parts)), known, strict=True):
                target.copy_(reader.read(place, expert, half if len(parts) > 1 else shape))
            continue
        tensors = {p: reader.read(q, expert, None) for p, q in zip(parts, known, strict=True)}
        try:
            result = found.weight_map.convert(tensors, shape)
            out[i].copy_(result.view(shape))
        except (RuntimeError, ValueError, IndexError) as err:
            raise CheckpointError(
                f"{known[0].file}: tensor {known[0].name} has shape {list(known[0].shape)}, which "
                f"does not convert to {name} {list(shape)} of expert {expert}: {err}"
            ) from err
    return out
