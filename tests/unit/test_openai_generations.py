"""Threads that generate are over before the process of the OpenAI-compatible server ends."""

from __future__ import annotations

import queue
import threading

import pytest

from expertwire.openai_server import Generations

# pytest reports also the SystemExit that ends a thread, which Python itself does not.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

SECONDS = 30.0  # a loaded machine is no failure


class Model:
    """Generates until it is let go; `broken` then raises, as a closed client makes it."""

    def __init__(self, broken: bool = False):
        self.entered, self.go, self.broken = threading.Event(), threading.Event(), broken

    def generate(self, text, *, more=""):
        """The text, and more."""
        self.entered.set()
        assert self.go.wait(SECONDS)
        if self.broken:
            raise RuntimeError("the client is closed")
        return text + more


def worker(model):
    """(thread, its queue of calls, what they answered): as transformers' server has one."""
    calls, answers = queue.Queue(), queue.Queue()

    def run():
        while (words := calls.get()) is not None:
            try:
                answers.put(model.generate(*words, more="!"))
            except Exception as err:  # and no SystemExit
                answers.put(err)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, calls, answers


def test_calls_and_errors_go_through():
    model = Model()
    assert Generations().watch(model) is model
    assert model.generate.__doc__ == "The text, and more."
    model.go.set()
    assert model.generate("a", more="b") == "ab"
    model.broken = True
    with pytest.raises(RuntimeError, match="closed"):
        model.generate("a")


@pytest.mark.parametrize("broken", [False, True])
def test_the_end_waits_for_the_thread_of_a_call(broken):
    generations, model = Generations(), Model(broken)
    thread, calls, answers = worker(generations.watch(model))
    calls.put(("a",))
    assert model.entered.wait(SECONDS)
    assert not generations.end(0.01)
    model.go.set()
    assert generations.end(SECONDS)
    assert not thread.is_alive()
    assert answers.empty(), "nobody reads it any more"


def test_the_end_does_not_wait_for_an_idle_thread_and_lets_no_call_begin():
    generations, model = Generations(), Model()
    thread, calls, answers = worker(generations.watch(model))
    model.go.set()
    calls.put(("a",))
    assert answers.get(timeout=SECONDS) == "a!"
    model.entered.clear()
    assert generations.end(0.0)
    assert thread.is_alive()
    calls.put(("b",))
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not model.entered.is_set()
