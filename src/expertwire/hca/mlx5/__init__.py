"""A real ConnectX through pyverbs and DevX: docs/mlx5.md. Nothing here needs pyverbs on import."""

from .config import Mlx5Config
from .hca import Mlx5Hca, open_mlx5

__all__ = ["Mlx5Config", "Mlx5Hca", "open_mlx5"]
