"""`expertwire openai`: the stock `transformers serve` server, with the experts elsewhere.

transformers' server makes its ModelManager and its GenerationState by name when it starts. Here
both are replaced, for that moment only, by subclasses: one that loads our model without experts,
and one that outlives a batch that failed because an expert server was away.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from . import transformers as integration
from .attention import AttentionClient, open_client
from .config import ClientConfig
from .errors import ConfigError
from .openai_errors import OpenAIErrors
from .processes import follow_parent, stop_on_signals
from .serve import load_progress, parse_device

START_SECONDS = 30.0  # for uvicorn to listen, once the model is loaded
# Continuous batching without limits takes what memory the machine has for its key-value cache.
CACHE_TOKENS = 16384  # over all requests
BLOCK_TOKENS = 32
BATCH_TOKENS = 256  # in one step, as many as one message to a server carries
STOP_SECONDS = 0.3  # for answers that are still on their way when the server ends
THREAD_SECONDS = 3.0  # for a thread of it to end, once its client is closed: a layer's time


def run_openai(
    model: str, registry: str, *, host: str, port: int, dtype: str | None, token: bytes,
    continuous_batching: bool, client_config: ClientConfig, device: str = "cpu",
) -> None:
    """Serves a model's attention side under the OpenAI API until SIGTERM or Ctrl-C.

    model: checkpoint folder; requests may name it by path or by the folder's name. device:
    of the attention side, "cpu", "cuda" or "cuda:N". Raises
    ConfigError if the serving extra is missing or the address is taken, CheckpointError,
    NoServerError.
    """
    require_serving()
    gpu = parse_device(device)
    check_address(host, port)
    integration.check_folder(model)
    stop = threading.Event()
    stop_on_signals(stop.set)
    follow_parent(stop.set)
    generations = Generations()
    with open_client(
        registry, device=gpu, token=token, config=client_config, name="openai"
    ) as client:
        serve = start_serve(
            model, client, generations, host=host, port=port, dtype=dtype,
            continuous_batching=continuous_batching, device=gpu,
        )
        try:
            where = listening(serve.server, serve._thread)
            if where is None:
                raise ConfigError(f"the HTTP server did not start on {host}:{port}")
            print(f"{Path(model).resolve().name}: OpenAI API listening on http://{where}/v1",
                  flush=True)
            while not stop.wait(0.2) and serve._thread.is_alive():
                pass
        finally:
            stop_serve(serve, client, generations)


def require_serving() -> None:
    """Raises ConfigError, with what to install, when transformers' server cannot run."""
    try:
        from transformers.utils.import_utils import is_serve_available

        available = is_serve_available()
    except ImportError:
        available = False
    if not available:
        raise ConfigError(
            "the OpenAI-compatible server needs more packages: pip install 'expertwire[serving]'"
        )


def check_address(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen there: sooner than after loading a model."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
            probe.bind(address)
    except (OSError, OverflowError) as err:
        raise ConfigError(f"cannot listen on {host}:{port}: {err}") from err


class Generations:
    """The `model.generate` calls under way, which have to end before the process does.

    They run in a daemon thread of transformers' server. One that is inside torch when the
    interpreter ends is torn out of C++ code, and the process aborts or hangs.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ending = False

    def watch(self, model: Any) -> Any:
        """The model, its `generate` now known here."""
        generate = model.generate

        @functools.wraps(generate)
        def watched(*args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread()
            with self._lock:
                if self._ending:
                    raise SystemExit
                self._threads.append(thread)
            try:
                return generate(*args, **kwargs)
            finally:
                with self._lock:
                    if self._ending:
                        raise SystemExit  # of this thread: nobody reads the answer any more
                    self._threads.remove(thread)

        model.generate = watched
        return model

    def end(self, seconds: float) -> bool:
        """Ends the threads that generate, as soon as their calls return; False if one did not."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._ending = True
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def start_serve(
    model: str, client: AttentionClient, generations: Generations, *, host: str, port: int,
    dtype: str | None, continuous_batching: bool, device: torch.device | None = None,
) -> Any:
    """transformers' Serve object, its HTTP server starting in a thread."""
    from transformers.cli.serve import Serve

    with replaced_classes(model, client, generations, dtype, device):
        return Serve(
            force_model=model, continuous_batching=continuous_batching,
            device=str(device or "cpu"), host=host, port=port, non_blocking=True,
            cb_block_size=BLOCK_TOKENS,
            cb_num_blocks=CACHE_TOKENS // BLOCK_TOKENS, cb_max_batch_tokens=BATCH_TOKENS,
        )


def stop_serve(serve: Any, client: AttentionClient, generations: Generations) -> None:
    """Ends the HTTP server and the threads that generate, in under 5 s.

    Answers get STOP_SECONDS to end; then the client is closed, which ends them with an error.
    """
    # Answers that are cut off are no fault: uvicorn says how many, and its tracebacks say no more.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not record.exc_info)
    serve.server.config.timeout_graceful_shutdown = STOP_SECONDS
    serve.server.should_exit = True
    serve._thread.join(STOP_SECONDS)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # we know why it fails
    client.close()
    generations.end(THREAD_SECONDS)
    serve.kill_server()
    serve.server.force_exit = True


def listening(server: Any, thread: threading.Thread) -> str | None:
    """HOST:PORT once the HTTP server listens there, None if it ended instead."""
    pause = threading.Event()
    for _ in range(int(START_SECONDS / 0.05)):
        if server.started:
            host, port = server.servers[0].sockets[0].getsockname()[:2]
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not thread.is_alive():
            return None
        pause.wait(0.05)
    return None


@contextlib.contextmanager
def replaced_classes(
    model: str, client: AttentionClient, generations: Generations, dtype: str | None,
    device: torch.device | None,
) -> Generator[None]:
    """While open, transformers' server is made with our manager, generation state and errors."""
    from transformers.cli.serving import model_manager, server, utils

    build = server.build_server
    places: list[tuple[Any, str, Any]] = [
        (model_manager, "ModelManager", make_manager(model, client, generations, dtype,
                                                     device)),
        (utils, "GenerationState", make_state(client)),
        (server, "build_server", lambda *args, **kwargs: OpenAIErrors(build(*args, **kwargs))),
    ]
    originals = [getattr(module, name) for module, name, _ in places]
    for module, name, replacement in places:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name, _), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def make_manager(
    path: str, client: AttentionClient, generations: Generations, dtype: str | None,
    device: torch.device | None,
) -> type:
    """A ModelManager class that knows one model, `path`, and loads it without its experts."""
    from transformers import AutoProcessor
    from transformers.cli.serving.model_manager import ModelManager

    folder = Path(path).resolve()
    name = folder.name

    class RemoteExpertsManager(ModelManager):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            # Set, it would refuse every spelling but one; process_model_name decides instead.
            self.force_model = None

        def process_model_name(self, model_id: str) -> str:  # type: ignore[override]
            if model_id in (name, path) or Path(model_id).resolve() == folder:
                return name
            from fastapi import HTTPException

            raise HTTPException(404, f"model {model_id!r} is not here; this server has {name!r}")

        def _load_processor(self, *_: Any, **__: Any) -> Any:
            return AutoProcessor.from_pretrained(str(folder))

        def _load_model(self, *_: Any, **__: Any) -> Any:
            return generations.watch(integration.load(
                folder, client, dtype=dtype, device=device,
                progress=load_progress("attention side"),
            ))

        def list_models(self, *_: Any, **__: Any) -> list[dict]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "expertwire"}]

        get_gen_models = list_models  # its name before 5.18

    return RemoteExpertsManager


def make_state(client: AttentionClient) -> type:
    """A GenerationState class that starts a new worker after one that died."""
    from transformers.cli.serving.utils import GenerationState

    class RecoveringState(GenerationState):
        def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
            # An error in a batch (no server holds an expert) ends transformers' batching worker
            # for good, and with it the requests it had. The next request gets a fresh one.
            if use_cb and not super().is_cb_alive():
                print("expertwire: the batching worker failed; starting a new one",
                      file=sys.stderr, flush=True)
                self.shutdown()
            if not use_cb or not super().is_cb_alive():
                client.recover()
            return super().get_manager(model_id, use_cb)

        def is_cb_alive(self) -> bool:
            """What /health says: can the next request be answered?"""
            return client.is_ready()

    return RecoveringState
