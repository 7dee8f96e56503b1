"""What a checkpoint's config.json says by itself: without torch, which takes seconds to import.

`read_config` (checkpoint.py) asks transformers, which also knows what a family takes where its
config is silent. Here are the answers that need no such knowledge.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import CheckpointError, ConfigError

NUM_EXPERTS_NAMES = ("num_local_experts", "n_routed_experts", "num_experts")
MIDDLE_SIZE_NAMES = ("moe_intermediate_size", "intermediate_size")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NEEDED = ("model_type", "num_hidden_layers", "hidden_size", "num_experts_per_tok",
          MIDDLE_SIZE_NAMES[0])


def checkpoint_folder(path: str | Path) -> Path:
    """The folder. Raises CheckpointError if it is none, or has no config.json."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a Hugging Face checkpoint folder")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; is it a Hugging Face checkpoint?")
    return folder


def stated_config(path: str | Path) -> SimpleNamespace | None:
    """The config's settings, if it states all that sizes follow from; with dtype_bytes.

    None where transformers has to be asked: something is left to the family's defaults, the
    language model is a part of it, or what is there has to be refused. Raises CheckpointError as
    `checkpoint_folder`.
    """
    folder = checkpoint_folder(path)
    try:
        facts: Any = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict) or any(isinstance(facts.get(name), dict) for name in (
            "text_config", "text_encoder", "decoder", "generator", "quantization_config")):
        return None
    experts = [name for name in NUM_EXPERTS_NAMES if name in facts]
    dtype = facts.get("dtype") or facts.get("torch_dtype")
    known = isinstance(dtype, str) and dtype in DTYPE_BYTES
    whole = known and len(experts) == 1 and all(name in facts for name in NEEDED)
    # Families that count routed experts begin with dense layers, three of them if nobody says so.
    if not whole or (experts[0] == "n_routed_experts" and "first_k_dense_replace" not in facts):
        return None
    return SimpleNamespace(**{**facts, "dtype_bytes": DTYPE_BYTES[dtype]})


def stated_num_experts(path: str | Path) -> int | None:
    """Experts of a layer, where the config states it. Raises CheckpointError for no folder."""
    config = stated_config(path)
    if config is None:
        return None
    count = next(getattr(config, name) for name in NUM_EXPERTS_NAMES if hasattr(config, name))
    return count if isinstance(count, int) else None


def parse_experts(text: str, num_experts: int) -> list[int]:
    """"0-15,40" -> [0, ..., 15, 40]. Raises ConfigError for what is not a list of expert ids."""
    ids: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not is_number(first) or (dash and not is_number(last)):
            raise ConfigError(f"--experts {text!r}: {part!r} is neither a number nor a range A-B")
        begin, end = int(first), int(last) if dash else int(first)
        if begin > end or end >= num_experts:
            raise ConfigError(
                f"--experts {text!r}: {part.strip()} is not within 0-{num_experts - 1}"
            )
        ids.update(range(begin, end + 1))
    return sorted(ids)


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
