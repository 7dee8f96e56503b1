"""The device code as one translation unit, so that a cubin's key is the text it came from."""

from __future__ import annotations

import functools
import re
from pathlib import Path

DEVICE = Path(__file__).parent.parent / "device"

# The files that define kernels; what they include comes with them.
ROOTS = (
    "client_route.cuh", "client_pack.cuh", "client_put.cuh",
    "client_quantise.cuh", "client_send.cuh", "client_combine.cuh", "client_failover.cuh",
    "server_poll.cuh", "server_gather.cuh", "server_reply.cuh", "server_echo.cuh",
    "device_checks.cuh", "gpu_hca.cuh", "clock_stamp.cuh",
)
_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)"[ \t]*$', re.MULTILINE)


def _expand(name: str, seen: set[str]) -> str:
    """Text of a device file with its includes of other device files put in, each once."""
    if name in seen:
        return ""
    seen.add(name)
    text = (DEVICE / name).read_text(encoding="utf-8").replace("#pragma once", "")
    parts, end = [f'#line 1 "{name}"\n'], 0
    for match in _INCLUDE.finditer(text):
        parts.append(text[end : match.start()])
        if match.group(1).endswith(".cuh"):
            line = text.count("\n", 0, match.end()) + 1
            parts.append(f'{_expand(match.group(1), seen)}\n#line {line} "{name}"')
        else:  # the other target, in a branch that is not compiled
            parts.append(match.group(0))
        end = match.end()
    return "".join([*parts, text[end:]])


@functools.cache
def device_source() -> str:
    """All kernels in one text: no include path is needed, wherever the package lies."""
    seen: set[str] = set()
    return "\n".join(_expand(name, seen) for name in ROOTS)
