"""Errors of the OpenAI-compatible server in the form that OpenAI's clients read.

transformers' server answers {"error": "text"}, {"detail": "text"} or plain text; the clients look
for {"error": {"message": ..., "type": ...}} and otherwise say no more than that there was an error.
This ASGI middleware rewrites what has status 400 or more, and the last event of a failed stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Send], Awaitable[None]]

# transformers puts the text between the quotes as it is, so it need not be JSON.
STREAM_ERROR = re.compile(rb'data: \{"error": "(.*)"\}\n\n\Z', re.DOTALL)


def error_object(text: str, status: int) -> dict[str, Any]:
    """The object that OpenAI's clients take an error's message from."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def rewrite_event(body: bytes) -> bytes:
    """A piece of a stream of server-sent events, with the error at its end, if any, rewritten."""
    found = STREAM_ERROR.search(body)
    if found is None:
        return body
    text = json.dumps(error_object(found[1].decode(errors="replace"), 500))
    return body[: found.start()] + b"data: " + text.encode() + b"\n\n"


def error_text(body: bytes) -> str:
    """What a refused request was answered with, as text."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    if isinstance(answer, dict):
        answer = answer.get("error", answer.get("detail", answer))
        if isinstance(answer, dict) and isinstance(answer.get("message"), str):
            return answer["message"]
    return answer if isinstance(answer, str) else json.dumps(answer)


class OpenAIErrors:
    """Wraps an ASGI application."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refused: list[Message] = []  # the start, and bodies, of an answer with an error status
        is_stream = False

        async def rewritten(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
                is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if refused or message.get("status", 0) >= 400:
                refused.append(message)
                return
            if is_stream and "body" in message:
                message = {**message, "body": rewrite_event(message["body"])}
            await send(message)

        reason = ""
        try:
            await self.app(scope, receive, rewritten)
        except Exception as err:
            reason = str(err)
            raise  # whoever logs errors does so
        finally:
            if refused:
                text = reason or error_text(b"".join(m.get("body", b"") for m in refused))
                await _answer(send, refused[0]["status"], text)
        return None


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps(error_object(text, status)).encode()
    headers = [(b"content-type", b"application/json"),
               (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
