"""Plugging remote experts into Hugging Face models.

One experts function named "expertwire" is registered with transformers. `attach` turns an existing
model's experts remote; `load` loads a checkpoint without ever reading its expert weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors import SafetensorError
from transformers.integrations.moe import ExpertsInterface

from .checkpoint import (
    expert_modules,
    fingerprint,
    open_weights,
    pluggable,
    read_config,
    weight_files,
)
from .errors import CheckpointError, ConfigError
from .message import dtype_of

NAME = "expertwire"
CLIENT, LAYER = "_expertwire_client", "_expertwire_layer"


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


def attach(model: Any, client: MoeClient) -> Any:
    """Makes the model's experts remote; its own expert weights are dropped. Returns the model.

    Raises CheckpointError for a family that cannot be plugged, ConfigError if the client's servers
    serve a model of another size.
    """
    modules = pluggable(model)
    check_model(model, len(modules), getattr(client, "model_info", None))
    for layer, (_, module) in enumerate(modules):
        drop_parameters(module)
        object.__setattr__(module, CLIENT, client)
        setattr(module, LAYER, layer)
    model.set_experts_implementation(NAME)
    return model


def check_model(model: Any, num_layers: int, info: dict | None) -> None:
    """Raises ConfigError if what the servers say of their model does not fit this one."""
    if info is None:
        return
    config = model.config.get_text_config()
    dtype = str(model.dtype).removeprefix("torch.")
    wanted = {"num_layers": num_layers, "hidden_size": config.hidden_size, "dtype": dtype}
    for name, value in wanted.items():
        if info.get(name) != value:
            hint = f"; start the servers with --dtype {dtype}" if name == "dtype" else ""
            raise ConfigError(
                f"the servers serve {info.get('name')} with {name} {info.get(name)}, this model "
                f"has {value}{hint}"
            )


def drop_parameters(module: torch.nn.Module) -> None:
    """Puts the parameters on the meta device, where they take no memory."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        meta = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        setattr(module, name, meta)


def load(
    path: str | Path, client: MoeClient, *, dtype: str | torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Loads everything but the experts, and attaches the client.

    The experts' tensors are never read and never take memory here. dtype: default what the servers
    compute in, if they are known already, else what the checkpoint says. Raises CheckpointError,
    ConfigError.
    """
    config = read_config(path)
    wait_ready = getattr(client, "wait_ready", None)
    if dtype is None and wait_ready is not None and getattr(client, "model_info", None) is None:
        wait_ready()
    info = getattr(client, "model_info", None)
    if dtype is None:
        dtype = info["dtype"] if info else "auto"
    kind = dtype if dtype == "auto" or isinstance(dtype, torch.dtype) else dtype_of(dtype)
    for file in weight_files(path):
        with open_weights(file):
            pass  # damage is reported with the file's name, before anything is built
    if info and info.get("fingerprint") and info["fingerprint"] != fingerprint(path):
        raise ConfigError(
            f"{path} is not the model that the servers serve ({info.get('name')}); give both the "
            "same checkpoint"
        )
    classes = {type(module) for _, module in expert_modules(config)}
    with no_expert_parameters(classes), quiet():
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(path), dtype=kind, experts_implementation=NAME, output_loading_info=True
            )
            model, report = loaded
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError) as err:
            raise CheckpointError(f"{path} cannot be loaded: {err!r}") from err
    missing = [name for name in report["missing_keys"] if ".experts." not in name]
    if missing:
        raise CheckpointError(f"{path}: tensors are missing: {', '.join(sorted(missing)[:5])}")
    if progress is not None:
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
        progress(num_bytes, num_bytes)
    return attach(model.eval(), client)


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
