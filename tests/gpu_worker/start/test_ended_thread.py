from __future__ import annotations

import threading

import pytest

from gpu_worker.start.ended_thread import run_in_ended_thread
from tests.gpu_worker.start.test_speculation_on_device import MB, Machine, generate


def test_thread_has_ended_when_the_result_is_there() -> None:
    thread = run_in_ended_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_error_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_ended_thread(lambda: 1 // 0)


def test_model_of_a_gpu_is_built_in_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, threads = Machine(monkeypatch, 100 * MB), []
    build = machine._build

    def built(*settings: object, **parts: object) -> object:
        threads.append(threading.current_thread())
        return build(*settings, **parts)

    monkeypatch.setattr(machine, "_build", built)
    generate()
    [thread] = threads
    assert thread.name == "build"
    assert not thread.is_alive()
