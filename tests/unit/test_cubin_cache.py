"""The cubin cache: cold starts side by side, kills, damage, folders that cannot be written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from expertwire import _native
from expertwire.cuda import cache, source
from expertwire.cuda.cache import cache_folder, entry_key, load_or_build
from expertwire.cuda.compile import compile_device_code, require
from expertwire.device_structs import KERNEL_ARGS
from expertwire.errors import ConfigError
from expertwire.launch import find_kernel

CUBIN = bytes(range(256)) * 5000


def build_once(calls):
    calls.append(1)
    return CUBIN


def test_second_time_comes_from_the_cache(tmp_path):
    calls = []
    assert load_or_build("k", lambda: build_once(calls), tmp_path) == (CUBIN, False)
    assert load_or_build("k", lambda: build_once(calls), tmp_path) == (CUBIN, True)
    assert load_or_build("other", lambda: build_once(calls), tmp_path) == (CUBIN, False)
    assert len(calls) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_key_parts_do_not_run_into_each_other():
    assert entry_key("ab", "c") != entry_key("a", "bc")
    assert entry_key("a") != entry_key("a", "")


@pytest.mark.parametrize("damage", [
    lambda raw: raw[:-1], lambda raw: raw[:20], lambda raw: b"", lambda raw: b"x" + raw[1:],
    lambda raw: raw[:1000] + b"\0" + raw[1001:], lambda raw: raw + b"more",
])
def test_damaged_entries_are_replaced(tmp_path, damage):
    load_or_build("k", lambda: CUBIN, tmp_path)
    path = tmp_path / "k.cubin"
    path.write_bytes(damage(path.read_bytes()))
    assert load_or_build("k", lambda: CUBIN, tmp_path) == (CUBIN, False)
    assert load_or_build("k", lambda: CUBIN, tmp_path) == (CUBIN, True)


def test_folder_that_cannot_be_used_costs_only_the_cache(tmp_path):
    file = tmp_path / "a file"
    file.write_text("not a folder")
    for folder in (file, file / "below", tmp_path / ("x" * 300)):
        assert load_or_build("k", lambda: CUBIN, folder) == (CUBIN, False)
    entry = tmp_path / "k.cubin"
    entry.mkdir()  # something else sits where the entry belongs
    assert load_or_build("k", lambda: CUBIN, tmp_path) == (CUBIN, False)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", ["with space", "ключ-钥匙", "quote'\"$HOME", "-n", "line\nbreak"])
def test_odd_paths(tmp_path, name):
    folder = tmp_path / name / "deeper"
    assert load_or_build("k", lambda: CUBIN, folder) == (CUBIN, False)
    assert load_or_build("k", lambda: CUBIN, folder) == (CUBIN, True)


def test_leftovers_of_killed_processes_go(tmp_path):
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.write_bytes(b"half")
    new.write_bytes(b"somebody is writing this now")
    os.utime(old, (0, time.time() - 2 * cache._STALE_SECONDS))
    load_or_build("k", lambda: CUBIN, tmp_path)
    assert not old.exists() and new.exists()


def test_failed_build_leaves_nothing(tmp_path):
    def fail():
        raise ConfigError("no compiler")

    with pytest.raises(ConfigError, match="no compiler"):
        load_or_build("k", fail, tmp_path)
    assert list(tmp_path.iterdir()) == []


CHILD = """
import sys
from pathlib import Path
from expertwire.cuda.cache import load_or_build
cubin = bytes(range(256)) * 20000
folder = Path(sys.argv[1])
while True:
    assert load_or_build("k", lambda: cubin, folder)[0] == cubin
    if len(sys.argv) > 2:
        break
    for file in folder.glob("*.cubin"):
        file.unlink(missing_ok=True)
"""


def test_many_cold_starts_and_kills(tmp_path):
    """Processes that write and remove the entry are killed in the middle of it; readers beside
    them get a whole cubin every time."""
    writers = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)]) for _ in range(2)
    ]
    try:
        deadline = time.monotonic() + 100
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < deadline, "the writers did not start"
            time.sleep(0.01)
        readers = [
            subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), "once"], check=False,
                           timeout=100) for _ in range(3)
        ]
        assert all(writer.poll() is None for writer in writers)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert [reader.returncode for reader in readers] == [0] * 3
    whole = bytes(range(256)) * 20000
    assert load_or_build("k", lambda: whole, tmp_path)[0] == whole


def test_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EXPERTWIRE_CUBIN_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("EXPERTWIRE_CUBIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "expertwire" / "cubin"


def test_every_kernel_is_known_to_both_targets():
    text = source.device_source()
    found = dict(re.findall(r"^EW_(?:WIDE_)?KERNEL\((\w+), (\w+)\)", text, re.MULTILINE))
    assert found == {name: args.__name__ for name, args in KERNEL_ARGS.items()}
    for name in KERNEL_ARGS:
        assert find_kernel(name)
    assert '#include "' not in text.replace('#include "target_cpu.hpp"', "")


def test_the_cpu_path_does_not_need_cuda_core():
    code = "import sys; from expertwire import Client, Server; import expertwire.cli; " \
           "sys.exit(any(m.startswith(('cuda.core', 'expertwire.cuda')) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=110).returncode == 0
    assert _native.library()


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"needs no_such_module.*expertwire\[gpu\]"):
        require("no_such_module")
    with pytest.raises(ConfigError, match="looks like sm_90"):
        compile_device_code("sm_90; rm -rf /")
