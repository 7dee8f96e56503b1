"""Greedy generation with remote experts: what `expertwire generate` and the demo do."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from .config import ClientConfig
from .errors import ConfigError


@dataclass
class Generation:
    """What one run of `generate` gave. Times are perf_counter nanoseconds."""

    token_ids: list[int]
    text: str
    seconds: float
    token_times_ns: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of decoding, the prompt's step not counted."""
        times = self.token_times_ns
        if len(times) < 2:
            return 0.0
        return (len(times) - 1) / ((times[-1] - times[0]) / 1e9)


class TokenStreamer:
    """Prints text as it comes and notes when each token came (transformers' streamer protocol)."""

    def __init__(self, tokenizer: Any, out: Any = None):
        self.tokenizer = tokenizer
        self.out = out
        self.times_ns: list[int] = []
        self._ids: list[int] = []
        self._printed = ""
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times_ns.append(time.perf_counter_ns())
        self._ids.extend(value.flatten().tolist())
        if self.out is not None:
            text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # half of a multi-byte character: wait for the rest
                self.out.write(text[len(self._printed) :])
                self.out.flush()
                self._printed = text

    def end(self) -> None:
        if self.out is not None:
            text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
            self.out.write(text[len(self._printed) :] + "\n")
            self.out.flush()


def generate(
    model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int, stream: Any = None,
    temperature: float = 0.0, seed: int | None = None,
) -> Generation:
    """Generates from a prompt; greedy unless a temperature is given.

    stream: a text file to print to while tokens come, or None.
    """
    if not prompt:
        raise ConfigError("the prompt is empty; give some text to continue")
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    streamer = TokenStreamer(tokenizer, stream)
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature}
    if seed is not None:
        torch.manual_seed(seed)
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, streamer=streamer,
            pad_token_id=tokenizer.pad_token_id, **options,
        )
    seconds = time.perf_counter() - start
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    return Generation(ids, tokenizer.decode(ids, skip_special_tokens=True), seconds,
                      streamer.times_ns)


def load_tokenizer(path: str) -> Any:
    """The checkpoint's tokenizer. Raises CheckpointError when the folder has none."""
    import transformers

    from .errors import CheckpointError

    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except Exception as err:
        raise CheckpointError(f"{path}: no usable tokenizer: {err}") from err


def run_generate(
    model_path: str, prompt: str, registry: str, *, max_new_tokens: int, temperature: float,
    seed: int | None, as_json: bool, token: bytes, dtype: str | None, config: ClientConfig,
    device: str = "cpu",
) -> dict[str, Any]:
    """`expertwire generate`: loads the attention side, streams to stdout, returns the facts.

    device: of the attention side, "cpu", "cuda" or "cuda:N". What is wrong with the folder is said
    first, before servers are looked for.
    """
    from . import transformers as integration
    from .attention import open_client
    from .serve import load_progress, parse_device

    gpu = parse_device(device)
    integration.check_folder(model_path)
    tokenizer = load_tokenizer(model_path)
    with open_client(registry, device=gpu, token=token, config=config) as client:
        model = integration.load(
            model_path, client, dtype=dtype, device=gpu, progress=load_progress("attention side")
        )
        stream = None if as_json else sys.stdout
        result = generate(
            model, tokenizer, prompt, max_new_tokens=max_new_tokens, stream=stream,
            temperature=temperature, seed=seed,
        )
        stats = client.stats()
    return {
        "text": result.text, "token_ids": result.token_ids, "tokens_per_s": result.tokens_per_s,
        "seconds": result.seconds, "servers": stats["servers"],
    }
