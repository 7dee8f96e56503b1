"""pyverbs, loaded when an adapter is opened and not before; its errors as ours."""

from __future__ import annotations

import contextlib
import errno
import importlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from .errors import CommandRefused, DeviceRefused, HcaError, VerbsMissing

INSTALL = (
    "apt-get install python3-pyverbs (it is built for the distribution's own Python: run "
    "expertwire in an environment made by `/usr/bin/python3 -m venv --system-site-packages`), or "
    "build rdma-core with its pyverbs for this Python"
)
# module -> what is used of it, as named since rdma-core 44
NAMES = {
    "pyverbs.device": ("get_device_list",),
    "pyverbs.pd": ("PD",),
    "pyverbs.mr": ("MR",),
    "pyverbs.pyverbs_error": ("PyverbsError",),
    "pyverbs.providers.mlx5.mlx5dv": (
        "Mlx5Context", "Mlx5DVContextAttr", "Mlx5DevxObj", "Mlx5UAR", "Mlx5UMEM"),
    "pyverbs.providers.mlx5.mlx5dv_objects": ("Mlx5DvObj",),
}
# mlx5dv.h: mlx5dv_context_attr_flags, mlx5dv_obj_type, MLX5DV_UMEM_MASK_DMABUF,
# mlx5dv_devx_alloc_uar types
CONTEXT_DEVX, OBJ_PD, UMEM_DMABUF = 1, 1 << 6, 1
UAR_NC_DEDICATED, UAR_NC = 2**31, 1
LOCKED_MEMORY = (
    "`ulimit -l unlimited`, or in a container --ulimit memlock=-1 --cap-add=IPC_LOCK"
)


def load() -> SimpleNamespace:
    """The classes of pyverbs that are used here. Raises VerbsMissing."""
    found: dict[str, Any] = {}
    for module, names in NAMES.items():
        try:
            loaded = importlib.import_module(module)
            found |= {name: getattr(loaded, name) for name in names}
        except (ImportError, AttributeError) as err:
            raise VerbsMissing(f"an mlx5 adapter is driven through pyverbs, and {err}: {INSTALL}",
                               ) from None
    return SimpleNamespace(**found, ah_mac=_ah_mac)


def _ah_mac(pd: int, path: Any) -> bytes:
    from .next_hop import next_hop_mac

    return next_hop_mac(pd, path)


def errno_of(err: BaseException) -> int:
    """The errno in a pyverbs error, which carries it as an attribute or in its text; 0: none."""
    code = getattr(err, "error_code", None)
    if isinstance(code, int) and code:
        return abs(code)
    text = str(err)
    for number, name in errno.errorcode.items():
        if f"Errno: {number}," in text or f"errno {number}" in text.lower() or name in text:
            return number
    return 0


@contextlib.contextmanager
def doing(verbs: Any, what: str, fixes: dict[int, tuple[type[HcaError], str]] | None = None,
          ) -> Generator[None]:
    """Runs pyverbs calls. An error of theirs becomes one of ours that says what and what to do.

    fixes: errno -> (error, advice), before the usual ones.
    """
    try:
        yield
    except verbs.PyverbsError as err:
        code = errno_of(err)
        kind, advice = {**_USUAL, **(fixes or {})}.get(
            code, (CommandRefused, "`dmesg | tail` has the firmware's syndrome"))
        name = f" ({errno.errorcode.get(code, code)})" if code else ""
        raise kind(f"{what}: {err}{name}. {advice}") from None


_USUAL: dict[int, tuple[type[HcaError], str]] = {
    errno.EACCES: (DeviceRefused, "This user may not use /dev/infiniband/uverbs*: "
                   "sudo usermod -aG rdma $USER, in a container --device=/dev/infiniband"),
    errno.EPERM: (DeviceRefused, "The kernel wants more rights: sudo setcap cap_net_raw+ep on the "
                  "interpreter, or in a container --cap-add=NET_RAW"),
    errno.ENOMEM: (DeviceRefused, f"Usually the limit of locked memory: {LOCKED_MEMORY}"),
    errno.EOPNOTSUPP: (DeviceRefused, "The adapter, its firmware or the kernel lacks it: ConnectX-5"
                       " or newer, with DevX (mlxconfig UCTX_EN=1) and Linux 5.9 or newer"),
}
