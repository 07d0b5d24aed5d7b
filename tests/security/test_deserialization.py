"""Incident class: unsafe deserialization. Nothing that comes from outside is ever unpickled, wherever it is put."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from gateway.api.schemas.parsing import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from gateway.errors import ApiError
from gpu_worker.consumer.queued_message import UnreadableRequestError, read_request
from gpu_worker.models.loader import load_model
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import HeadraceError
from shared.messages import BatchResult, Cancel, Delta, Frame, GatewayHeartbeat, Heartbeat
from shared.tokenizer_calls import TokenizerCall, TokenizerReply
from tests.gpu_worker.consumer.harness import DEMO_MODEL

WEIGHTS = "model.safetensors"


class Bomb:
    """What leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.trace,)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "executed"


@pytest.fixture
def bomb(trace: Path) -> bytes:
    payload = pickle.dumps(Bomb(trace))
    assert b"touch" in payload
    assert trace.name.encode() in payload
    return payload


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The demo model's directory without its weights."""
    copy = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, copy, ignore=shutil.ignore_patterns(WEIGHTS))
    return copy


def load(directory: Path) -> None:
    load_model(directory, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("parse", [parse_chat, parse_completion, parse_tokenize, parse_detokenize])
def test_pickle_as_a_body_is_a_400(parse: Callable[[bytes], object], bomb: bytes, trace: Path) -> None:
    with pytest.raises(ApiError) as caught:
        parse(bomb)
    assert (caught.value.status, trace.exists()) == (400, False)


def test_pickle_as_a_request_is_unreadable(bomb: bytes, trace: Path) -> None:
    with pytest.raises(UnreadableRequestError):
        read_request(bomb)
    assert not trace.exists()


@pytest.mark.parametrize(
    "kind", [Frame, Delta, Heartbeat, GatewayHeartbeat, Cancel, TokenizerCall, TokenizerReply, BatchResult]
)
def test_pickle_as_any_message_is_refused(kind: type, bomb: bytes, trace: Path) -> None:
    # msgpack's extensions could carry anything; no hook is there to make something of it.
    for payload in (bomb, msgspec.msgpack.encode(msgspec.msgpack.Ext(1, bomb))):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.msgpack.decode(payload, type=kind)
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        msgspec.json.decode(bomb, type=kind)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "model.pkl"])
def test_pickled_checkpoint_is_refused(directory: Path, bomb: bytes, trace: Path, name: str) -> None:
    (directory / name).write_bytes(bomb)
    with pytest.raises(HeadraceError, match=WEIGHTS):
        load(directory)
    assert not trace.exists()


def test_zip_of_torch_is_refused(directory: Path, bomb: bytes, trace: Path) -> None:
    with zipfile.ZipFile(directory / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
    with pytest.raises(HeadraceError, match=WEIGHTS):
        load(directory)
    shutil.move(directory / "pytorch_model.bin", directory / WEIGHTS)
    with pytest.raises(HeadraceError):
        load(directory)
    assert not trace.exists()


@pytest.mark.parametrize("name", [WEIGHTS, "model.safetensors.index.json", "config.json", "tokenizer.json"])
def test_pickle_under_the_name_of_a_file_that_is_read_is_refused(
    directory: Path, bomb: bytes, trace: Path, name: str
) -> None:
    (directory / name).write_bytes(bomb)

    def read() -> None:
        ModelTokenizer(read_model_directory(directory))
        load(directory)

    with pytest.raises(HeadraceError):
        read()
    assert not trace.exists()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_pickle_as_an_optional_file_is_refused(directory: Path, bomb: bytes, trace: Path, name: str) -> None:
    (directory / name).write_bytes(bomb)
    with pytest.raises(HeadraceError):
        read_model_directory(directory)
    assert not trace.exists()


def test_code_in_a_model_directory_is_not_imported(directory: Path, trace: Path) -> None:
    """What others run with `trust_remote_code`."""
    (directory / "modeling_evil.py").write_text(f"open({str(trace)!r}, 'w')")
    config = msgspec.json.decode((directory / "config.json").read_bytes())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"}
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    shutil.copy(DEMO_MODEL / WEIGHTS, directory)
    ModelTokenizer(read_model_directory(directory))
    load(directory)
    assert not trace.exists()
