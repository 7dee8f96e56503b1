"""The shared token, and how each side of a connection proves that it knows it.

The proof is HMAC-SHA256 (RFC 2104) with the token as key over a label and both nonces. Both nonces
are fresh, so a recorded proof is worth nothing later; the labels of the two directions differ, so
a proof cannot be sent back to the side that made it. Nothing here touches a socket.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from ..errors import AuthError, ExpertwireError, ProtocolError

CONTROL_PROTOCOL = 1
NONCE_BYTES = 32
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
WRONG_TOKEN = "wrong token"


# ------------------------------------------------------------------------ token


def token_path() -> Path:
    """EXPERTWIRE_TOKEN_FILE, else expertwire/token under the user's state folder."""
    override = os.environ.get("EXPERTWIRE_TOKEN_FILE")
    if override:
        return Path(override)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "expertwire" / "token"


def load_token(path: str | Path | None = None, create: bool = True) -> bytes:
    """The shared secret: EXPERTWIRE_TOKEN, else the token file, made (mode 0600) if `create`.

    Raises AuthError when there is none, when it is shorter than 16 bytes, when it cannot be read
    or made, or when others may read the file.
    """
    if path is None and os.environ.get("EXPERTWIRE_TOKEN"):
        return _checked(os.fsencode(os.environ["EXPERTWIRE_TOKEN"]), "EXPERTWIRE_TOKEN")
    file = Path(path) if path is not None else token_path()
    try:
        return _read_token(file)
    except FileNotFoundError:
        if not create:
            raise AuthError(
                f"no token at {file}; start the registry first (it makes one), copy the file from "
                "the registry's machine, or set EXPERTWIRE_TOKEN"
            ) from None
    except OSError as err:
        raise AuthError(f"cannot read the token file {file}: {err.strerror}") from None
    try:
        _create_token(file)
        return _read_token(file)
    except OSError as err:
        raise AuthError(
            f"cannot make the token file {file}: {err.strerror}; set EXPERTWIRE_TOKEN_FILE to a "
            "place that can be written, or EXPERTWIRE_TOKEN"
        ) from None


def _read_token(file: Path) -> bytes:
    # O_NONBLOCK: a FIFO at this path must not hold the process. The mode is that of the file that
    # is read, not of whatever has the name a moment later.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _refuse_readable(file, os.fstat(descriptor).st_mode)
        return _checked(os.read(descriptor, MAX_TOKEN_BYTES + 1), str(file))
    finally:
        os.close(descriptor)


def private_file(file: str | Path) -> None:
    """Raises AuthError if others than its owner may use the file, OSError if it is not there."""
    _refuse_readable(file, os.stat(file).st_mode)


def _refuse_readable(file: str | Path, mode: int) -> None:
    if mode & 0o077:
        raise AuthError(
            f"{file} can be read by others (mode {mode & 0o777:04o}); run: chmod 600 {file}"
        )


def _create_token(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as out:
            out.write(secrets.token_hex(32) + "\n")
        os.link(fresh, file)  # atomic: of several starting processes one wins, all read the same
    except FileExistsError:
        pass
    finally:
        fresh.unlink()


def _checked(token: bytes, source: str) -> bytes:
    token = token.strip()
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise AuthError(
            f"the token in {source} has {len(token)} bytes; {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} "
            "are possible"
        )
    return token


# ------------------------------------------------------------------------ proof


def printable(text: object, limit: int = 200) -> str:
    """What a peer said, safe for a log or a terminal: one line, bounded, no control characters."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text)[: limit + 1])
    return shown if len(shown) <= limit else shown[:limit] + "..."


def proof(token: bytes, label: bytes, accept_nonce: bytes, connect_nonce: bytes) -> str:
    """HMAC-SHA256 as 64 hex digits. The nonces have a fixed size, so no two inputs coincide."""
    return hmac.new(token, label + accept_nonce + connect_nonce, hashlib.sha256).hexdigest()


def hello() -> dict:
    """The first message of either side: protocol version and a fresh nonce."""
    return {"expertwire": CONTROL_PROTOCOL, "nonce": secrets.token_hex(NONCE_BYTES)}


def check_hello(message: dict) -> bytes:
    """The peer's nonce. Raises ProtocolError for another protocol version or a bad nonce."""
    if "error" in message:
        raise ProtocolError(f"the peer refused: {printable(message['error'])}")
    version = message.get("expertwire")
    if version != CONTROL_PROTOCOL or isinstance(version, bool):
        raise ProtocolError(
            f"the peer speaks control protocol {printable(version, 20)}, this side "
            f"{CONTROL_PROTOCOL}: use the same expertwire release on both sides"
        )
    try:
        nonce = bytes.fromhex(message.get("nonce", ""))
    except (TypeError, ValueError):
        nonce = b""
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError("the peer's hello has no usable nonce")
    return nonce


def check_proof(
    token: bytes, label: bytes, accept_nonce: bytes, connect_nonce: bytes, message: dict
) -> None:
    """Raises AuthError unless the message proves knowledge of the token.

    Raises ProtocolError if the peer refused for another reason than the token.
    """
    if "error" in message and message["error"] != WRONG_TOKEN:
        raise ProtocolError(f"the peer refused: {printable(message['error'])}")
    given = message.get("proof")
    expected = proof(token, label, accept_nonce, connect_nonce)
    usable = isinstance(given, str) and given.isascii()
    if not usable or not hmac.compare_digest(str(given), expected):
        raise AuthError(
            "the two sides have different tokens; both need the same EXPERTWIRE_TOKEN or the same "
            f"token file (here: {_token_source()})"
        )


def _token_source() -> str:
    return "EXPERTWIRE_TOKEN" if os.environ.get("EXPERTWIRE_TOKEN") else str(token_path())


def refusal(err: ExpertwireError) -> dict:
    """What the accepting side says before it closes; tells an outsider nothing it did not send."""
    return {"error": WRONG_TOKEN if isinstance(err, AuthError) else str(err)}
