from __future__ import annotations

from gpu_worker.execution.start_up import Stage, StartUp


def test_summary_has_the_parts_and_the_rate_of_loading() -> None:
    ticks = iter((0.0, 1.0, 3.0, 3.0, 3.5, 4.0, 6.0, 6.5))
    start_up = StartUp(clock=lambda: next(ticks))
    with start_up.stage(Stage.LOAD) as progress:
        progress(4_000_000_000, 8_000_000_000)
        progress(8_000_000_000, 8_000_000_000)
    with start_up.stage(Stage.PROFILE):
        pass
    with start_up.stage(Stage.CAPTURE):
        pass
    assert start_up.summary() == "ready in 6.5 s: load 2.0 s (8.00 GB at 4.0 GB/s), profile 0.5 s, capture 2.0 s"


def test_progress_is_passed_on_with_its_stage() -> None:
    seen: list[tuple[Stage, int, int]] = []
    start_up = StartUp(lambda *call: seen.append(call))
    with start_up.stage(Stage.CAPTURE) as progress:
        progress(1, 2)
    assert seen == [(Stage.CAPTURE, 1, 2)]
    assert start_up.loaded_bytes == 0
