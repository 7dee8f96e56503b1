"""Faults on the way back, from servers to clients: what a server's own queues meet.

A chaos plan's server is a process of its own, so its HCA hears of faults through the process'
standard input, one JSON object a line:

    run:     tell(child, network, seed)        fleet.py's child, a phase's network or None
    server:  stdin = hear(stdin)               before it opens its HCA (zygote.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from ..hca import on_open
from .network import Network, break_path, mend_path

if TYPE_CHECKING:
    from ..processes import ChildProcess


def tell(child: ChildProcess, network: Network | None, seed: int = 0) -> None:
    """From now on what this server sends meets these faults; None: it lands at once again.

    A server that has ended meanwhile is none to tell.
    """
    order = {"server": child.name, "seed": seed,
             "network": None if network is None else dataclasses.asdict(network)}
    stream = child.process.stdin
    assert stream is not None
    with contextlib.suppress(OSError, ValueError):
        stream.write(json.dumps(order) + "\n")
        stream.flush()


def hear(stdin: int) -> int:
    """In a server's process: obeys what comes over `stdin`. Returns a descriptor to use instead of
    it: nothing comes there, and it ends with `stdin`."""
    quiet, end = os.pipe()
    hcas: list[Any] = []
    on_open.append(hcas.append)

    def listen() -> None:
        with os.fdopen(stdin) as lines:
            for line in lines:
                try:
                    obey(hcas[-1], json.loads(line))
                except Exception:  # the run would count faults that are not there
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(70)
        os.close(end)

    threading.Thread(target=listen, name="chaos-faults", daemon=True).start()
    return quiet


def obey(hca: Any, order: dict[str, Any]) -> None:
    """Does what `tell` says to a server's HCA."""
    if order["network"] is None:
        mend_path(hca)
    else:
        break_path(hca, Network(**order["network"]), order["seed"], lambda _: order["server"])
