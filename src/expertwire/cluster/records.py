"""What is up: a folder for each cluster under the user's state folder, on the machine of `up`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .config import ClusterConfig, parse_config

RECORD = "cluster.json"


def clusters_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "expertwire" / "clusters"


def cluster_folder(name: str) -> Path:
    return clusters_folder() / name


@contextlib.contextmanager
def changing(name: str) -> Generator[None]:
    """One command at a time changes a cluster. Raises ConfigError while another one does."""
    folder = cluster_folder(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"another `expertwire up` or `scale` is changing cluster {name} now; "
                          "wait for it to end") from None
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            folder.rmdir()  # it holds nothing: nothing was started


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Readers see the old content or the new one, nothing between."""
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    fresh.write_text(json.dumps(content, indent=1))
    os.replace(fresh, file)


def read_json(file: Path) -> dict[str, Any]:
    """{} for a file that is not there."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return {}


def write_record(config: ClusterConfig, where: str) -> None:
    folder = cluster_folder(config.name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(folder / RECORD, {"on": where, "config": config.as_dict()})


def find_record(name: str) -> tuple[str, ClusterConfig] | None:
    """Where the cluster of that name runs, and how; None if there is none."""
    file = cluster_folder(name) / RECORD
    record = read_json(file)
    if not record:
        return None
    return record["on"], parse_config(record["config"], str(file))


def only_name() -> str:
    """The name of the one cluster that is up. Raises ConfigError unless there is exactly one."""
    names = sorted(file.parent.name for file in clusters_folder().glob(f"*/{RECORD}"))
    if not names:
        raise ConfigError("no cluster is up from here; `expertwire up CONFIG.yaml` starts one")
    if len(names) > 1:
        raise ConfigError(f"{len(names)} clusters are up; say which: {', '.join(names)}")
    return names[0]


def remove_record(name: str) -> None:
    shutil.rmtree(cluster_folder(name), ignore_errors=True)
