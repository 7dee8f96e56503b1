"""expertwire: the experts of a Mixture-of-Experts model as independent, stateless services."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client.client import Client
    from .client.flight import Handle
    from .config import ClientConfig, ServerConfig
    from .registry.registry import Registry
    from .server.server import Server

__version__ = "0.1.0"

_PLACES = {
    "Client": "client.client", "Handle": "client.flight", "ClientConfig": "config",
    "ServerConfig": "config",
    "Registry": "registry.registry", "Server": "server.server", "ExpertwireError": "errors",
}
__all__ = ["Client", "ClientConfig", "Handle", "Registry", "Server", "ServerConfig"]


def __getattr__(name: str):
    """Imports on first use, so that commands that need no torch start at once."""
    if name in _PLACES:
        return getattr(import_module(f".{_PLACES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
