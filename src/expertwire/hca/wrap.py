"""HCAs around an HCA: the hook that sees every entry before it is executed, shared by several."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

# hook(context, queue number, entry index, address of the entry, bytes) -> 0 or a syndrome
Hook = Callable[[Any, int, int, int, int], int]


class HcaWrapper(abc.ABC):
    """Passes everything on to `inner`, an HCA with hooks, and looks at every entry.

    Wrappers nest: what is outside sees an entry first. Hooks run inside the engine, which holds the
    HCA's lock: they must not call methods of the same HCA.
    """

    def __init__(self, inner: Any):
        self.inner = inner
        self._outer: Hook | None = None
        inner.set_hook(self._hook)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def set_hook(self, hook: Hook | None) -> None:
        """A hook before this wrapper's own."""
        self._outer = hook

    def _hook(self, context: Any, qpn: int, idx: int, addr: int, num_bytes: int) -> int:
        verdict = self._outer(context, qpn, idx, addr, num_bytes) if self._outer else 0
        return verdict or self.on_entry(qpn, idx, addr, num_bytes)

    @abc.abstractmethod
    def on_entry(self, qpn: int, idx: int, addr: int, num_bytes: int) -> int:
        """0: execute it; a syndrome: fail it; HOOK_STALL: ask again later."""

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> HcaWrapper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
