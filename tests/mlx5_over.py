"""A software HCA whose queue pairs are laid out by the mlx5 bring-up, for tests of entries.

Ring, records, register page and completion queue are where hca/mlx5/queue.py put them and told the
firmware (mlx5_fake.py reads the commands); everything else is the software HCA. What a test asks
for that an adapter is never asked for (completion queues that are rings, foreign memory) is not.
"""

from __future__ import annotations

import ctypes
from typing import Any

from expertwire.hca.mlx5 import Mlx5Hca
from expertwire.hca.soft import CQ_COLLAPSED, CQ_OVERRUN_IGNORE, SoftHca, SoftQp
from tests.mlx5_fake import Fabric, FakeDevice

COLLAPSED = CQ_COLLAPSED | CQ_OVERRUN_IGNORE


class OverMlx5(SoftHca):
    """`laid_out` counts the queue pairs that the bring-up has made, of all of them."""

    laid_out = 0

    def __init__(self, thread: bool = False):
        super().__init__(thread=thread)
        self.fake = FakeDevice(Fabric(), soft=self)
        self._mlx5 = Mlx5Hca("mlx5_0", verbs=self.fake.verbs)

    def create_qp(self, depth: int = 1024, **options: Any) -> SoftQp:
        plain = options.get("num_cqe") in (None, depth)
        if not plain or options.get("cq_flags", COLLAPSED) != COLLAPSED or options.get("pd"):
            return super().create_qp(depth, **options)
        OverMlx5.laid_out += 1
        made = self._mlx5.create_qp(depth)
        behind = self.fake.qps[made.info.qpn]
        qp = behind.soft
        qp.info = made.info
        qp.info.proxy_addr = ctypes.addressof(behind.proxy)
        qp.behind, qp.destroy = behind, made.destroy  # gives the queue pair itself back too
        behind.soft = _Destroyer(qp)
        return qp

    def close(self) -> None:
        self._mlx5.close()
        self.fake.close()
        super().close()


class _Destroyer:
    """What the fake firmware destroys: the software HCA's queue pair, by its own method."""

    def __init__(self, qp: SoftQp):
        self._qp = qp

    def destroy(self) -> None:
        SoftQp.destroy(self._qp)
