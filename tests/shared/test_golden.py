"""Baselines of golden prompts: files of strangers are refused by a sentence that says why."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.golden import MAX_FILE_BYTES, Baseline, GoldenPrompt, make_key, read_baseline, read_key, sign
from shared.golden_statistic import LIMIT, answer_deviation, limit, score_deviation

KEY, OTHER = b"k" * 32, b"o" * 32
IDS = tuple(range(20))
BASELINE = Baseline(
    model="m",
    recorded=1.0,
    noise=0.001,
    prompts=(GoldenPrompt(IDS, tuple(-float(i % 5) for i in range(19))),),
    answer=(((1, -0.5), (2, -1.5)),),
)


def _problem(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "baseline"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_baseline(path, KEY, "HEADRACE_GOLDEN")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return caught.value.problem


def _signed(content: object) -> bytes:
    """Sign a content that no recorder would make."""
    whole = sign(BASELINE, KEY)
    data = msgspec.json.encode(content)
    return whole.split(b" ")[0] + b" " + hmac.new(KEY, data, hashlib.sha256).hexdigest().encode() + b"\n" + data


def test_what_was_signed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "baseline"
    path.write_bytes(sign(BASELINE, KEY))
    assert read_baseline(path, KEY, "HEADRACE_GOLDEN") == BASELINE


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is not a signed baseline"),
        (msgspec.json.encode(BASELINE), "is not a signed baseline"),
        (sign(BASELINE, OTHER), "was not signed by this key"),
        (sign(BASELINE, KEY).replace(b"-0.5", b"-0.6"), "was changed since"),
        (b"x" * (MAX_FILE_BYTES + 1), "larger than 16 MiB"),
        (_signed({"model": "m"}), "cannot be used"),
        (_signed({**msgspec.to_builtins(BASELINE), "noise": 1e300}), "cannot be used"),
        (_signed({**msgspec.to_builtins(BASELINE), "weights": "int4"}), "cannot be used"),
        (_signed({**msgspec.to_builtins(BASELINE), "prompts": [[list(IDS), [-1.0] * 18]]}), "one log probability"),
    ],
    ids=["empty", "unsigned", "other key", "changed", "huge", "incomplete", "huge number", "unknown", "lengths"],
)
def test_file_that_is_no_baseline_of_this_key_is_refused(data: bytes, told: str, tmp_path: Path) -> None:
    assert told in _problem(tmp_path, data)


def test_missing_files_and_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_baseline(tmp_path / "none", KEY, "HEADRACE_GOLDEN")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path / "none", "HEADRACE_GOLDEN_KEY_FILE")
    (tmp_path / "key").write_text("secret")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_key(tmp_path / "key", "HEADRACE_GOLDEN_KEY_FILE")


def test_key_is_kept_to_its_owner(tmp_path: Path) -> None:
    key = make_key(tmp_path / "key")
    assert read_key(tmp_path / "key", "HEADRACE_GOLDEN_KEY_FILE") == key
    assert stat.S_IMODE(os.stat(tmp_path / "key").st_mode) == 0o600


@given(
    st.lists(st.floats(-20.0, 0.0), min_size=2, max_size=50),
    st.floats(-0.5, 0.5),
    st.floats(1.0, 8.0),
)
def test_deviation_of_a_model_does_not_depend_on_how_sure_it_is(
    logprobs: list[float], shift: float, factor: float
) -> None:
    moved = [value + shift for value in logprobs]
    deviation = score_deviation(logprobs, moved)
    if deviation < 1.0:  # below that, the least spread decides
        scaled = score_deviation([factor * value for value in logprobs], [factor * value for value in moved])
        assert scaled == pytest.approx(deviation, abs=1e-9) or scaled >= deviation / factor


def test_numbers_that_are_none_count_as_the_most() -> None:
    assert score_deviation([-1.0, -2.0], [float("nan"), float("-inf")]) > 10.0
    assert answer_deviation((((1, -1.0),),), [], 1.0) > 1.0


def test_answer_is_compared_up_to_the_first_other_choice() -> None:
    expected = (((1, -0.1), (2, -3.0)), ((5, -0.2),))
    same = [(1, {1: -0.1, 2: -3.0}), (5, {5: -0.2})]
    assert answer_deviation(expected, same, 1.0) == 0.0
    # The second place follows another token, so that its numbers say nothing.
    flipped = [(2, {1: -0.1, 2: -3.0}), (5, {5: -9.0})]
    assert answer_deviation(expected, flipped, 1.0) == 0.0
    assert answer_deviation(expected, [(1, {1: -0.1}), (5, {5: -0.2})], 1.0) > 1.0


def test_limit_follows_the_noise_of_the_recording_but_excuses_no_four_bits() -> None:
    assert limit(0.0) == LIMIT
    assert limit(0.01) == 0.04
    assert limit(1e6) < 0.09


def test_file_that_cannot_be_written_is_named_as_it_was_typed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as refused:
        make_key(tmp_path / "nowhere" / "key")
    assert refused.value.filename == str(tmp_path / "nowhere" / "key")
