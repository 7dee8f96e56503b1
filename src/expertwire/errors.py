"""Every error that expertwire raises on purpose.

One family, so that `except ExpertwireError` is enough; one class per thing a caller may
want to handle differently. A message says what, where, and what to do next.
"""

from __future__ import annotations


class ExpertwireError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(ExpertwireError, ValueError):
    """An argument, option, environment variable or checkpoint does not fit."""


class CheckpointError(ConfigError):
    """A model folder is missing, damaged, or of a family that cannot be served."""


class CompileError(ExpertwireError):
    """The device code cannot be compiled for a GPU; the compiler's text is in the message."""


class AuthError(ExpertwireError):
    """The peer did not prove that it knows the shared token."""


class ProtocolError(ExpertwireError):
    """Bytes from a peer are not what this protocol version allows."""


class HandleError(ProtocolError):
    """A connection or memory handle is damaged, truncated, or of another version."""


class NoServerError(ExpertwireError):
    """No live server holds an expert that a batch needs.

    `servers` are those that held one of these `experts` last, as far as this client knows.
    """

    def __init__(
        self, message: str, layer: int | None = None, experts: tuple[int, ...] = (),
        servers: tuple[str, ...] = (),
    ):
        super().__init__(message)
        self.layer = layer
        self.experts = experts
        self.servers = servers


class InFlightError(ExpertwireError):
    """One batch more than `max_in_flight` was dispatched, and `on_full` is "raise"."""


class ServerLostError(ExpertwireError):
    """A server went away (socket closed, error completion) while a batch needed it."""

    def __init__(self, message: str, server: str = "", layer: int | None = None):
        super().__init__(message)
        self.server = server
        self.layer = layer


class RejectedError(ExpertwireError):
    """A server refused a message; `reason` is one of message.Reason."""

    def __init__(self, message: str, reason: int = 0, server: str = ""):
        super().__init__(message)
        self.reason = reason
        self.server = server


class WaitTimeout(ExpertwireError, TimeoutError):
    """A bounded wait ran out.

    Carries what was waited for: `stage`, `peer`, and the `expected` and `seen` values.
    """

    def __init__(
        self, message: str, stage: str = "", peer: str = "", expected: object = None,
        seen: object = None,
    ):
        super().__init__(message)
        self.stage = stage
        self.peer = peer
        self.expected = expected
        self.seen = seen


class HcaError(ExpertwireError):
    """An error completion or a refused call of the HCA.

    `syndrome` is the mlx5 CQE syndrome (rdma-core mlx5dv.h, MLX5_CQE_SYNDROME_*), 0 if the
    error did not come from a completion; `wqe_idx` the running index of the failed WQE.
    """

    def __init__(self, message: str, syndrome: int = 0, wqe_idx: int = -1, peer: str = ""):
        super().__init__(message)
        self.syndrome = syndrome
        self.wqe_idx = wqe_idx
        self.peer = peer
