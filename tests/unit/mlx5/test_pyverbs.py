"""The installed pyverbs has every name that the bring-up uses, with the values it assumes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from expertwire.hca.mlx5 import verbs

PYTHON = os.environ.get("PYVERBS_PYTHON", "/usr/bin/python3")
SCRIPT = """
import importlib, json, sys
names = json.loads(sys.argv[1])
missing = [f"{module}.{name}" for module, all_names in names.items() for name in all_names
           if not hasattr(importlib.import_module(module), name)]
from pyverbs.providers.mlx5 import mlx5_enums as mlx5, mlx5dv
from pyverbs.device import Context
used = {mlx5dv.Mlx5Context: ["devx_general_cmd", "devx_query_eqn", "query_port", "query_device",
                             "query_pkey", "query_gid", "query_gid_table", "close"],
        mlx5dv.Mlx5DevxObj: ["modify", "query", "out_view", "close"],
        mlx5dv.Mlx5UMEM: ["umem_id", "close"], mlx5dv.Mlx5UAR: ["reg_addr", "page_id", "close"],
        importlib.import_module("pyverbs.pd").PD: ["pd", "close"],
        importlib.import_module("pyverbs.mr").MR: ["lkey", "rkey", "close"]}
missing += [f"{cls.__name__}.{name}" for cls, all_names in used.items() for name in all_names
            if not hasattr(cls, name)]
print(json.dumps({"missing": missing, "values": [
    int(mlx5.MLX5DV_CONTEXT_FLAGS_DEVX), int(mlx5.MLX5DV_OBJ_PD),
    int(mlx5.MLX5DV_UMEM_MASK_DMABUF), int(mlx5._MLX5DV_UAR_ALLOC_TYPE_NC)]}))
"""


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")


def test_names_and_values(request):
    if not Path(PYTHON).exists() or run(PYTHON, "-c", "import pyverbs").returncode:
        if request.config.getoption("--require-oracles"):
            pytest.fail("pyverbs is not installed: apt-get install python3-pyverbs")
        pytest.skip("pyverbs is not installed")
    done = run(PYTHON, "-c", SCRIPT, json.dumps(verbs.NAMES))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["missing"] == []
    assert found["values"] == [verbs.CONTEXT_DEVX, verbs.OBJ_PD, verbs.UMEM_DMABUF, verbs.UAR_NC]
