"""Reading Hugging Face MoE checkpoints: what is in a folder, and only the experts one wants.

Weights stay on disk in the layout their family publishes: one tensor per expert and projection
(gate_proj/up_proj/down_proj, or w1/w3/w2), or one tensor for all experts of a layer. Either way
only the wanted experts' bytes are read, through safetensors' memory map.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError, ConfigError
from .experts import ExpertLayer, ExpertShard
from .message import dtype_of
from .plain_experts import plain_modules

INDEX = "model.safetensors.index.json"
PER_EXPERT = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\..*?(?<!shared_)experts\.(?P<expert>\d+)\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
FUSED = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?:.*\.)?(?:(?<!shared_)experts\."
    r"(?P<part>gate_up_proj|up_proj|down_proj)(?P<bias>_bias)?"
    r"|block_sparse_moe\.(?P<linear>input_linear|output_linear)\.weight)"
)
PART_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
LINEAR_NAMES = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
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
    """Where one expert tensor is: file and name, or a slice of a tensor for all experts."""

    file: Path
    name: str
    shape: tuple[int, ...]
    fused: bool


def read_config(path: str | Path) -> Any:
    """The folder's transformers config. Raises CheckpointError if it has none or it is damaged."""
    import transformers

    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a Hugging Face checkpoint folder")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face checkpoint?")
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


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise CheckpointError(
        f"model type {config.model_type!r} has none of {', '.join(names)} in its config: it does "
        "not look like a Mixture-of-Experts model"
    )


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
def open_weights(file: Path) -> Iterator[Any]:
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

    def read(self, place: TensorPlace, expert: int, shape: tuple[int, ...]) -> torch.Tensor:
        """One expert's tensor, from the map. Raises CheckpointError naming file and tensor."""
        if place.file not in self._open:
            self._open[place.file] = self.enter_context(open_weights(place.file))
        tensors = self._open[place.file]
        try:
            if place.fused:
                data = tensors.get_slice(place.name)[expert]
            else:
                data = tensors.get_tensor(place.name)
        except (SafetensorError, OSError, IndexError) as err:
            raise CheckpointError(f"{place.file}: tensor {place.name}: {err}") from err
        if tuple(data.shape) != shape:
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


def find_experts(path: str | Path) -> dict[int, dict[tuple[str, int], TensorPlace]]:
    """{decoder layer: {(part, expert id or -1 for all): place}} from the files' headers only."""
    layers: dict[int, dict[tuple[str, int], TensorPlace]] = {}
    for file in weight_files(path):
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if match := PER_EXPERT.fullmatch(name):
                    part = PART_NAMES.get(match["part"], match["part"])
                    key = (part, int(match["expert"]))
                elif match := FUSED.fullmatch(name):
                    part = LINEAR_NAMES.get(match["linear"] or "", match["part"])
                    key = (part + (match["bias"] or ""), -1)
                else:
                    continue
                shape = tuple(tensors.get_slice(name).get_shape())
                place = TensorPlace(file, name, shape, key[1] == -1)
                layers.setdefault(int(match["layer"]), {})[key] = place
    return layers


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
    num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    top_k = _first(config, "num_experts_per_tok", "moe_topk", "num_experts_per_token")
    layers = find_experts(path)
    if not layers:
        raise CheckpointError(
            f"{path}: no expert tensors of a known layout in model type {config.model_type!r}"
        )
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    folder = Path(path).resolve()
    return ModelInfo(
        fingerprint(path), folder.name, config.model_type, len(layers), num_experts,
        config.hidden_size, top_k, str(dtype).removeprefix("torch."),
    )


def expert_modules(config: Any) -> list[tuple[str, torch.nn.Module]]:
    """(name, experts module) of each MoE layer, in order, on the meta device.

    Raises CheckpointError for a family whose experts cannot be replaced.
    """
    import transformers

    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as err:
        raise CheckpointError(
            f"transformers cannot build model type {config.model_type!r}: {err}"
        ) from err
    return pluggable(model)


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
            f"model type {kind!r} cannot be served: its experts do not use transformers' experts "
            "interface (they are dense, or computed inside the model's own code), so there is no "
            "place to plug in; see the list of families in the README"
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
    config = read_config(path)
    info = inspect_model(path)
    wanted = sorted(set(range(info.num_experts) if experts is None else experts))
    bad = [e for e in wanted if not 0 <= e < info.num_experts]
    if bad or not wanted:
        raise ConfigError(
            f"experts {bad or 'none'} of {info.name}: it has {info.num_experts}, numbered from 0"
        )
    kind = dtype_of(info.dtype) if dtype is None else dtype
    target = dtype_of(kind) if isinstance(kind, str) else kind
    layers = find_experts(path)
    modules = plain_modules(config, len(layers), info.num_experts) or expert_modules(config)
    if len(modules) != len(layers):
        raise CheckpointError(
            f"{path}: {len(layers)} layers have expert tensors, the config says {len(modules)}"
        )
    total = sum(_layer_elements(m) for _, m in modules) * target.itemsize
    total = total * len(wanted) // info.num_experts
    done = 0
    loaded = []
    for (_, module), layer in zip(modules, sorted(layers), strict=True):
        parts = {}
        with WeightReader() as reader:
            for name, parameter in module.named_parameters():
                parts[name] = _load_parameter(
                    reader, path, layer, name, parameter, wanted, layers[layer], target
                )
                done += parts[name].numel() * target.itemsize
                if progress is not None:
                    progress(done, total)
        for name in parts:
            delattr(module, name)
        loaded.append(ExpertLayer(module, parts))
    return ExpertShard(loaded, wanted, info.hidden_size, target)


def _layer_elements(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _load_parameter(
    reader: WeightReader, path: str | Path, layer: int, name: str, parameter: torch.nn.Parameter,
    wanted: list[int], places: dict[tuple[str, int], TensorPlace], dtype: torch.dtype,
) -> torch.Tensor:
    """One fused parameter, the wanted experts' rows of it: [len(wanted), ...]."""
    shape = tuple(parameter.shape[1:])
    out = torch.empty((len(wanted), *shape), dtype=dtype)
    for i, expert in enumerate(wanted):
        if (name, -1) in places:
            sources = [((name, -1), out[i])]
        elif name == "gate_up_proj":
            half = shape[0] // 2  # [gate; up], as transformers concatenates them
            sources = [(("gate_proj", expert), out[i, :half]), (("up_proj", expert), out[i, half:])]
        else:
            sources = [((name, expert), out[i])]
        for key, target in sources:
            if key not in places:
                raise CheckpointError(
                    f"{path}: layer {layer} has no {key[0]} of expert {expert}; the checkpoint is "
                    "incomplete"
                )
            target.copy_(reader.read(places[key], expert, tuple(target.shape)))
    return out
