"""Errors in the form that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import json

import pytest

from expertwire.openai_errors import OpenAIErrors, rewrite_event


def answer(app) -> tuple[int, bytes, Exception | None]:
    """(status, body, what was raised) of one request to the wrapped application."""
    sent, raised = [], None

    async def send(message):
        sent.append(message)

    try:
        asyncio.run(OpenAIErrors(app)({"type": "http"}, None, send))
    except Exception as err:
        raised = err
    body = b"".join(m.get("body", b"") for m in sent)
    for name, value in sent[0]["headers"]:
        if name == b"content-length":
            assert int(value) == len(body)
    return sent[0]["status"], body, raised


def app(status: int, body: bytes, kind: bytes = b"application/json", error=None):
    async def run(scope, receive, send):
        await send({"type": "http.response.start", "status": status,
                    "headers": [(b"content-type", kind)]})
        half = len(body) // 2
        await send({"type": "http.response.body", "body": body[:half], "more_body": True})
        await send({"type": "http.response.body", "body": body[half:]})
        if error is not None:
            raise error

    return run


@pytest.mark.parametrize("status, body, text, kind", [
    (404, b'{"detail": "no such model"}', "no such model", "invalid_request_error"),
    (503, b'{"error": "the worker died"}', "the worker died", "server_error"),
    (422, b'{"detail": [{"loc": 1}]}', '[{"loc": 1}]', "invalid_request_error"),
    (500, b"Internal Server Error", "Internal Server Error", "server_error"),
    (500, b'{"error": {"message": "as it is"}}', "as it is", "server_error"),
])
def test_refusals_become_error_objects(status, body, text, kind):
    got_status, got, _ = answer(app(status, body))
    assert got_status == status
    assert json.loads(got) == {
        "error": {"message": text, "type": kind, "param": None, "code": None}
    }


def test_what_was_raised_is_the_message_and_is_still_raised():
    error = RuntimeError('no server holds expert "3"')
    status, body, raised = answer(app(500, b"Internal Server Error", b"text/plain", error))
    assert status == 500 and raised is error
    assert json.loads(body)["error"]["message"] == str(error)


def test_good_answers_pass_as_they_are():
    assert answer(app(200, b'{"error": "a text about errors"}'))[1] == (
        b'{"error": "a text about errors"}'
    )


@pytest.mark.parametrize("text", ["lost", 'holds "expert" 3\nand {more}', "\u00e9\\n", ""])
def test_the_last_event_of_a_failed_stream(text):
    before = b'data: {"choices": []}\n\n'
    events = rewrite_event(before + b'data: {"error": "' + text.encode() + b'"}\n\n')
    assert events.startswith(before)
    error = json.loads(events[len(before) :].removeprefix(b"data: "))["error"]
    assert error["message"] == text and error["type"] == "server_error"
    assert events.count(b"\n\n") == 2, "one event each"


def test_other_events_pass_as_they_are():
    event = b'data: {"choices": [{"delta": {"content": "error"}}]}\n\n'
    assert rewrite_event(event) == event
