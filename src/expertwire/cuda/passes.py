"""Work that goes on by itself on a stream of its own, because a thread relaunches it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from ..errors import ExpertwireError
from .compile import require

PASSES_AHEAD = 4  # that wait on the GPU while the CPU sleeps


class Passes:
    """Calls `enqueue` over and over with `stream` current, a few passes ahead of the GPU.

    Each pass must end by itself: whoever synchronises the device waits for those that are enqueued.
    """

    def __init__(self, stream: torch.cuda.Stream, enqueue: Callable[[], None], name: str):
        self.stream, self._enqueue, self._name = stream, enqueue, name
        self.num_done = 0
        self._stop = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            driver = require("cuda.bindings.driver")
            # Another thread may be capturing: waiting for an event here is no part of it.
            relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            (error, _) = driver.cuThreadExchangeStreamCaptureMode(relaxed)
            if int(error) != 0:
                raise ExpertwireError(f"the capture mode of {self._name}: {error.name}")
            torch.cuda.set_device(self.stream.device)
            ahead: deque[torch.cuda.Event] = deque()
            with torch.cuda.stream(self.stream):
                while not self._stop:
                    self._enqueue()
                    event = torch.cuda.Event(blocking=True)
                    event.record()
                    ahead.append(event)
                    if len(ahead) > PASSES_AHEAD:
                        ahead.popleft().synchronize()
                        self.num_done += 1
                for event in ahead:
                    event.synchronize()
        except BaseException as err:
            self._error = err

    def check(self) -> None:
        """Raises what ended the thread, if something did."""
        if self._error is not None:
            raise ExpertwireError(f"{self._name} stopped: {self._error}") from self._error

    def close(self) -> None:
        """Ends after the passes that are enqueued. Idempotent."""
        self._stop = True
        self._thread.join(10)
