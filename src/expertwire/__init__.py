"""expertwire: the experts of a Mixture-of-Experts model as independent, stateless services."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import Client
    from .config import ClientConfig, ServerConfig
    from .flight import Handle
    from .registry import Registry
    from .server import Server

__version__ = "0.1.0"

_PLACES = {
    "Client": "client", "Handle": "flight", "ClientConfig": "config", "ServerConfig": "config",
    "Registry": "registry", "Server": "server", "ExpertwireError": "errors",
}
__all__ = ["Client", "ClientConfig", "Handle", "Registry", "Server", "ServerConfig"]


def __getattr__(name: str):
    """Imports on first use, so that commands that need no torch start at once."""
    if name in _PLACES:
        return getattr(import_module(f".{_PLACES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
