import json
import logging
import sys
from pathlib import Path

import pytest

from shared.telemetry import JsonFormatter, LineFormatter, configure_logging


def _line(message: str, kind: type[LineFormatter] | type[JsonFormatter] = LineFormatter, **extra: object) -> str:
    told = {"name": "part", "levelname": "INFO", "msg": message, "created": 0.25, "msecs": 250.0}
    return kind({"role": "worker"}).format(logging.makeLogRecord(told | extra))


def test_line_has_time_level_name_message_and_fields() -> None:
    assert _line("model loaded", num_blocks=7, rate=1 / 3) == (
        "1970-01-01T00:00:00.250Z INFO part model loaded num_blocks=7 rate=0.333333 role=worker"
    )


def test_hostile_values_stay_on_one_line() -> None:
    line = _line("refused\nERROR forged", name_given='a" x=1\nERROR forged', empty="", long="y" * 9000)
    assert "\n" not in line
    assert r'name_given="a\" x=1\nERROR forged"' in line
    assert 'empty=""' in line
    assert len(line) < 1000


def test_exception_becomes_one_field() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        line = _line("failed", exc_info=sys.exc_info())
    assert "\n" not in line
    assert 'trace="Traceback' in line


def test_json_line_has_the_same_fields_with_their_types() -> None:
    fields = {"tokens": 7, "ttft_s": 0.5, "path": Path("/x"), "rate": float("nan"), "forged": "a\nb"}
    line = _line("request", JsonFormatter, **fields)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "part",
        "message": "request",
        "tokens": 7,
        "ttft_s": 0.5,
        "path": "/x",
        "rate": "nan",
        "forged": "a\nb",
        "role": "worker",
    }


@pytest.mark.parametrize(
    ("level", "is_told", "torch_level"),
    [("debug", True, logging.WARNING), ("info", True, logging.WARNING), ("error", False, logging.ERROR)],
)
def test_level_holds_for_all_but_torch_which_tells_nothing_below_warnings(
    level: str, is_told: bool, torch_level: int, capsys: pytest.CaptureFixture[str]
) -> None:
    root, torch = logging.getLogger(), logging.getLogger("torch")
    handlers, levels = [*root.handlers], (root.level, torch.level)
    try:
        configure_logging(level, role="worker")
        logging.getLogger("part").info("model loaded")
        torch.info("compiled")
        assert torch.getEffectiveLevel() == torch_level
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        torch.setLevel(levels[1])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["INFO part model loaded role=worker"] * is_told
