from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ops.cli.perplexity import command
from ops.perplexity import Score, windows
from shared.errors import ConfigError
from tests.ops.quantize.layer_models import TEXT, save_model


@given(st.integers(2, 200), st.integers(2, 50), st.data())
def test_windows_score_every_token_but_the_first_once(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1))
    token_ids = list(range(length))

    cut = list(windows(token_ids, context, stride))

    scored = [token for window in cut for token in window.token_ids[-window.num_scored :]]
    assert scored == token_ids[1:]
    assert all(len(window.token_ids) <= context for window in cut)
    # All but those of the first window see at least a window less a stride.
    assert all(len(window.token_ids) - window.num_scored >= context - stride for window in cut[1:])


def transformers_perplexity(model: Any, token_ids: list[int], context: int, stride: int) -> float:
    """The recipe of the documentation of `transformers`, except that targets are counted exactly."""
    nats, count, end_before = 0.0, 0, 1
    for begin in range(0, len(token_ids), stride):
        end = min(begin + context, len(token_ids))
        ids = torch.tensor([token_ids[begin:end]])
        targets = ids.clone()
        targets[:, : -(end - end_before)] = -100
        with torch.inference_mode():
            loss = model(ids, labels=targets).loss
        nats += float(loss) * (end - end_before)
        count += end - end_before
        end_before = end
        if end == len(token_ids):
            break
    return math.exp(nats / count)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_perplexity_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", family)
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:1500])
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "model" / "tokenizer.json"))
    token_ids = tokenizer(text.read_text())["input_ids"]
    expected = transformers_perplexity(model, token_ids, 48, 20)

    arguments = ["--model", str(tmp_path / "model"), "--text", str(text), "--context", "48", "--stride", "20"]
    result = CliRunner().invoke(command, [*arguments, "--dtype", "float32", "--num-threads", "1"])

    assert result.exit_code == 0, result.output
    measured = float(result.output.split("perplexity ")[1].split()[0])
    assert measured == pytest.approx(expected, rel=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    return directory


def test_kv_cache_in_eight_bits_is_measured(model: Path) -> None:
    arguments = ["--model", str(model), "--text", str(model / "text.txt"), "--context", "48", "--dtype", "float32"]
    found = {}
    for kv_dtype in ("auto", "int8", "fp8"):
        result = CliRunner().invoke(command, [*arguments, "--num-threads", "1", "--kv-cache-dtype", kv_dtype])
        assert result.exit_code == 0, result.output
        assert f"KV cache {kv_dtype})" in result.output
        found[kv_dtype] = float(result.output.split("perplexity ")[1].split()[0])
    assert len(set(found.values())) == 3
    assert found["int8"] == pytest.approx(found["auto"], rel=0.002)
    assert found["fp8"] == pytest.approx(found["auto"], rel=0.02)


def test_interrupted_measurement_says_what_it_had(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> Iterator[Score]:
        yield Score(math.log(3) * 7, 7)
        raise KeyboardInterrupt

    monkeypatch.setattr("ops.perplexity.score", stopped)
    result = CliRunner().invoke(command, ["--model", str(model), "--text", str(model / "text.txt"), "--context", "20"])
    assert isinstance(result.exception, SystemExit)
    told = "interrupted; perplexity 3.0000 over the first 7 tokens; nothing is kept: started again it begins anew"
    assert told in result.output.splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--text"),
        (("--text", "missing.txt"), "cannot be read"),
        (("--text", "text.txt", "--context", "64"), "at most"),
        (("--text", "text.txt", "--context", "20", "--stride", "20"), "--stride"),
        (("--text", "text.txt", "--device", "gpu"), "--device: is 'gpu'; this machine has: cpu"),
    ],
)
def test_bad_settings_are_named(options: tuple[str, ...], message: str, model: Path) -> None:
    given = [str(model / option) if option.endswith(".txt") else option for option in options]
    with pytest.raises(ConfigError, match=message):
        command.main(["--model", str(model), *given], standalone_mode=False)
