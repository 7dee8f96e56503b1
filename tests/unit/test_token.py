"""The shared secret: its file, its permissions, the environment."""

from __future__ import annotations

import os
import stat

import pytest

from expertwire.control.frames import load_token
from expertwire.errors import AuthError


def test_token_file_is_made_private_and_kept(tmp_path):
    path = tmp_path / "deep" / "token"
    first = load_token(path)
    assert len(first) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_token(path) == load_token(path, create=False) == first
    assert [p.name for p in path.parent.iterdir()] == ["token"], "no temporary file stays"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o601, 0o777])
def test_a_token_that_others_may_read_is_refused_with_the_cure(tmp_path, mode):
    path = tmp_path / "token"
    load_token(path)
    path.chmod(mode)
    with pytest.raises(AuthError, match=f"chmod 600 {path}"):
        load_token(path)
    path.chmod(0o600)
    load_token(path)


def test_no_token_short_token_and_unusable_places(tmp_path):
    with pytest.raises(AuthError, match="EXPERTWIRE_TOKEN"):
        load_token(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    short = tmp_path / "short"
    short.write_text("0123456789abcde\n")
    short.chmod(0o600)
    with pytest.raises(AuthError, match="15 bytes"):
        load_token(short)
    with pytest.raises(AuthError):
        load_token(tmp_path)  # a folder
    with pytest.raises(AuthError):
        load_token(short / "below" / "token")  # under a file


def test_environment_wins_and_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPERTWIRE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("EXPERTWIRE_TOKEN", "from-the-environment-0123\n")
    assert load_token() == b"from-the-environment-0123"
    assert not (tmp_path / "token").exists()
    monkeypatch.setenv("EXPERTWIRE_TOKEN", "short")
    with pytest.raises(AuthError):
        load_token()
    monkeypatch.delenv("EXPERTWIRE_TOKEN")
    assert load_token() == (tmp_path / "token").read_bytes().strip()


def test_racing_creation_gives_all_processes_one_token(tmp_path):
    path = tmp_path / "state" / "expertwire" / "token"
    go_read, go_write = os.pipe()
    out_read, out_write = os.pipe()
    racers = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(go_write)
                os.read(go_read, 1)  # all wait for the end of file
                os.write(out_write, load_token(path) + b"\n")
            finally:
                os._exit(0)
        racers.append(pid)
    for fd in (go_read, go_write, out_write):
        os.close(fd)
    with os.fdopen(out_read, "rb") as out:
        tokens = out.read().split()
    for pid in racers:
        os.waitpid(pid, 0)
    assert len(tokens) == 8
    assert len(set(tokens)) == 1
    assert [p.name for p in path.parent.iterdir()] == ["token"]
