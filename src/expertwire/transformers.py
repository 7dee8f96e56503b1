"""Plugging remote experts into Hugging Face models.

One experts function named "expertwire" is registered with transformers. `attach` turns an existing
model's experts remote, `detach` turns them back; `load` loads a checkpoint without ever reading its
expert weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import SafetensorError
from transformers.integrations.moe import ExpertsInterface

from .errors import CheckpointError, ConfigError
from .message import dtype_of
from .model.checkpoint import (
    build_model,
    fingerprint,
    open_weights,
    pluggable,
    read_config,
    top_k_of,
    weight_files,
)
from .model.weight_map import parameter_sizes

NAME = "expertwire"
CLIENT, LAYER = "_expertwire_client", "_expertwire_layer"  # attributes of an experts module
ORIGINAL = "_expertwire_original"  # attribute of a model: its experts implementation before attach


class MoeClient(Protocol):
    """What attention-side code needs of a client."""

    def moe(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor: ...


def expertwire_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor, **_: Any,
) -> torch.Tensor:
    """The experts function: hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H].

    Raises ConfigError on a module that no client was attached to.
    """
    client = getattr(module, CLIENT, None)
    if client is None:
        raise ConfigError(
            'experts_implementation "expertwire" needs a client: load the model with '
            "expertwire.transformers.load(path, client) or call attach(model, client)"
        )
    return client.moe(getattr(module, LAYER), hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(NAME, expertwire_experts)


def attach(model: Any, client: MoeClient, *, keep_weights: bool = False) -> Any:
    """Makes the model's experts remote. Returns the model.

    model: a transformers model of a supported family, on the CPU, or on the GPU of a client there.
    client: connected or not; it stays the caller's to close. keep_weights: False drops the model's
    own expert weights (their parameters go to the meta device, where they take no memory), True
    keeps them for `detach`. Raises CheckpointError for a family that cannot be plugged, ConfigError
    if the client's servers serve a model of another size, top-k or dtype.
    """
    modules = pluggable(model)
    sizes = [parameter_sizes(module) for _, module in modules if has_parameters(module)]
    check_model(model, len(modules), sizes, getattr(client, "model_info", None))
    if getattr(modules[0][1], CLIENT, None) is None:
        object.__setattr__(model, ORIGINAL, model.config._experts_implementation)
    for layer, (_, module) in enumerate(modules):
        if not keep_weights:
            drop_parameters(module)
        object.__setattr__(module, CLIENT, client)
        setattr(module, LAYER, layer)
    model.set_experts_implementation(NAME)
    return model


def detach(model: Any) -> Any:
    """Gives the model back its own experts function, as before `attach`. Returns the model.

    Raises ConfigError for a model that no client is attached to, and for one without its expert
    weights: attach with keep_weights=True, or load them first.
    """
    modules = [module for _, module in pluggable(model)]
    if getattr(modules[0], CLIENT, None) is None:
        raise ConfigError("no client is attached to this model")
    if any(not has_parameters(m) or any(p.is_meta for p in m.parameters()) for m in modules):
        raise ConfigError(
            "this model has no expert weights of its own to go back to: attach with "
            "keep_weights=True, or give it weights (model.load_state_dict(..., assign=True)) first"
        )
    model.set_experts_implementation(getattr(model, ORIGINAL))
    for module in modules:
        delattr(module, CLIENT)
        delattr(module, LAYER)
    return model


def check_model(
    model: Any, num_layers: int, sizes: Sequence[tuple[int, int]], info: dict | None
) -> None:
    """Raises ConfigError if what the servers say of their model does not fit this one.

    sizes: (number of experts, hidden size) of MoE layers, as far as known. info: None if no server
    is known yet.
    """
    if info is None:
        return
    config = model.config.get_text_config()
    dtype = str(model.dtype).removeprefix("torch.")
    wanted = [("num_layers", num_layers), ("top_k", top_k_of(model, config)), ("dtype", dtype)]
    for num_experts, hidden_size in sizes:
        wanted += [("num_experts", num_experts), ("hidden_size", hidden_size)]
    for name, value in wanted:
        if info.get(name) != value:
            hint = f"; start the servers with --dtype {dtype}" if name == "dtype" else ""
            raise ConfigError(
                f"the servers serve {info.get('name')} with {name} {info.get(name)}, this model "
                f"has {value}{hint}"
            )


def has_parameters(module: torch.nn.Module) -> bool:
    """False for experts of a model that was loaded without them."""
    return next(module.parameters(recurse=False), None) is not None


def drop_parameters(module: torch.nn.Module) -> None:
    """Puts the parameters on the meta device, where they take no memory."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        meta = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        setattr(module, name, meta)


def check_folder(path: str | Path) -> Any:
    """The config of a checkpoint folder whose files can be opened. Raises CheckpointError."""
    config = read_config(path)
    for file in weight_files(path):
        with open_weights(file):
            pass  # damage is reported with the file's name, before anything is built
    return config


def load(
    path: str | Path, client: MoeClient, *, dtype: str | torch.dtype | None = None,
    device: torch.device | None = None, progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Loads everything but the experts, attaches the client, and returns the model, in eval mode.

    path: a Hugging Face checkpoint folder. The experts' tensors are never read and never take
    memory here. client: a Client; it stays the caller's to close. dtype: of the weights here,
    "float32", "bfloat16", "float16" or a torch dtype; default what the servers compute in (waits
    for them if they are not known yet). device: where the attention side goes, default the
    CPU. progress(done, total): called with bytes as tensors are loaded, the last time with
    done == total.

    Raises CheckpointError for a folder that is damaged or of a family that cannot be plugged
    (before servers are waited for), ConfigError if it is not the model that the servers serve, and
    what `Client.wait_ready` raises.
    """
    outline = build_model(check_folder(path))
    experts = [module for _, module in pluggable(outline)]
    wait_ready = getattr(client, "wait_ready", None)
    if dtype is None and wait_ready is not None and getattr(client, "model_info", None) is None:
        wait_ready()
    info = getattr(client, "model_info", None)
    if dtype is None:
        dtype = info["dtype"] if info else "auto"
    kind = dtype if dtype == "auto" or isinstance(dtype, torch.dtype) else dtype_of(dtype)
    if info and info.get("fingerprint") and info["fingerprint"] != fingerprint(path):
        raise ConfigError(
            f"{path} is not the model that the servers serve ({info.get('name')}); give both the "
            "same checkpoint"
        )
    sizes = parameter_bytes(outline, kind)
    with (
        no_expert_parameters({type(module) for module in experts}), quiet(),
        loading_progress(sizes, progress),
    ):
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(path), dtype=kind, experts_implementation=NAME, output_loading_info=True,
                ignore_mismatched_sizes=True,  # which makes it say which; they are refused below
            )
            model, report = loaded
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as err:
            raise CheckpointError(f"{path} cannot be loaded: {err!r}") from err
    wrong = sorted(report.get("mismatched_keys") or [])
    if wrong:
        raise CheckpointError(f"{path}: {mismatch(path, *wrong[0])}"
                              + (f", and {len(wrong) - 1} tensors more" if wrong[1:] else ""))
    missing = [name for name in report["missing_keys"] if ".experts." not in name]
    if missing:
        raise CheckpointError(f"{path}: tensors are missing: {', '.join(sorted(missing)[:5])}")
    if progress is not None:
        progress(sum(sizes.values()), sum(sizes.values()))
    check_model(model, len(experts), [parameter_sizes(module) for module in experts], info)
    return attach(model.eval().to(device or "cpu"), client)


def mismatch(path: str | Path, name: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    """A tensor whose shape is not the model's, in words, with its file if its name tells it."""
    where = ""
    for file in weight_files(path):
        with open_weights(file) as tensors:
            if name in tensors.keys():  # noqa: SIM118 (not a mapping)
                where = f"{file.name}: "
    return f"{where}tensor {name} has shape {list(found)}, the config makes it {list(wanted)}"


def parameter_bytes(outline: torch.nn.Module, dtype: str | torch.dtype) -> dict[str, int]:
    """Bytes of each parameter that is loaded here, experts not among them, by its name.

    dtype: of the loaded weights; "auto" for the outline's own.
    """
    return {
        name: p.numel() * (dtype.itemsize if isinstance(dtype, torch.dtype) else p.itemsize)
        for name, p in outline.named_parameters() if ".experts." not in name
    }


@contextlib.contextmanager
def loading_progress(
    sizes: dict[str, int], progress: Callable[[int, int], None] | None
) -> Generator[None]:
    """While open, progress(done, total) is told of each tensor that transformers has loaded.

    Takes the place of transformers' own bar, which counts tensors, not bytes.
    """
    from transformers.utils import logging as hf_logging

    if progress is None or not hasattr(hf_logging, "set_tqdm_hook"):
        yield
        return
    report, total = progress, sum(sizes.values())

    def follow(items: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        done = 0
        for name, mapping in items:
            yield name, mapping
            done += sizes.get(name, 0)
            if done < total:  # the end is reported once, by whoever checks what came of it
                report(done, total)

    def hook(make: Callable, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if options.get("desc") == "Loading weights" and args:
            return follow(args[0])
        return make(*args, **options)

    previous = hf_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(previous)


@contextlib.contextmanager
def no_expert_parameters(classes: Collection[type]) -> Generator[None]:
    """While open, experts modules of these classes are made without parameters."""
    originals: dict[type, Any] = {cls: cls.__init__ for cls in classes}

    def without_parameters(original: Callable) -> Callable:
        def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            with torch.device("meta"):
                original(self, *args, **kwargs)
            for name, _ in list(self.named_parameters(recurse=False)):
                delattr(self, name)
            # Nothing is left that transformers would initialise.
            object.__setattr__(self, "_is_hf_initialized", True)

        return __init__

    for cls, original in originals.items():
        setattr(cls, "__init__", without_parameters(original))  # noqa: B010
    try:
        yield
    finally:
        for cls, original in originals.items():
            setattr(cls, "__init__", original)  # noqa: B010


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Without the warning that lists every expert tensor as unexpected, and its progress bar."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
