"""Incident class: path traversal. Names of models and files within a model's directory reach nothing outside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from gateway.api.schemas.parsing import parse_completion
from gpu_worker.models.loader import load_model
from gpu_worker.text.chat_template import load_chat_template
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.sentence_modules import SentenceModules
from shared.errors import HeadraceError
from shared.subjects import decode_name, encode_name, request_subject, result_subject
from tests.gpu_worker.consumer.harness import DEMO_MODEL, TestGateway

NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "..\\..\\windows",
    "file:///etc/passwd",
    "a/../../b",
    "%2e%2e%2f",
    "m.batch.other",
    "m.>",
    "*",
    "hr.req.m",
    "$JS.API",
    "a b",
    "a\tb\r\nc",
    "~root",
]


@pytest.mark.parametrize("name", NAMES)
def test_name_is_one_token_of_a_subject_and_comes_back(name: str) -> None:
    token = encode_name(name)
    assert not set(token) & set("./\\*> \t\r\n$%~:")
    assert decode_name(token) == name
    assert request_subject(name, "batch", name).split(".") == ["hr", "req", token, "batch", token]
    assert result_subject(name, "r1").split(".") == ["hr", "result", token, "r1"]


@pytest.mark.parametrize("name", NAMES)
def test_model_name_of_a_request_is_a_name_and_never_a_path(name: str) -> None:
    body = json.dumps({"model": name, "prompt": "x"}).encode()
    assert parse_completion(body).model == name


@pytest.mark.parametrize("name", ["../../etc/passwd", str(DEMO_MODEL)])
async def test_worker_opens_no_model_that_a_request_names(gateway: TestGateway, make_worker: object, name: str) -> None:
    await make_worker()  # type: ignore[operator]
    answer = await gateway.publish(gateway.request(model=name))
    finish = (await answer.wait()).finish
    assert (finish.reason, finish.error_param) == ("failed", "model")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, copy)
    shutil.move(copy / "model.safetensors", tmp_path / "outside.safetensors")
    return copy


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/tmp/outside.safetensors", "./../outside.safetensors", "a/../../outside.safetensors"],
)
def test_index_that_points_outside_the_directory_is_refused(directory: Path, shard: str) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": shard}}
    (directory / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(HeadraceError, match=r"only \*.safetensors files in the model's own"):
        load_model(directory, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("link", ["../../etc/passwd", "/etc/passwd"])
def test_template_that_names_a_file_is_a_text(directory: Path, link: str) -> None:
    config = {"chat_template": link}
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    template = load_chat_template(read_model_directory(directory))
    assert template.render([], add_generation_prompt=True) == link


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_template_that_is_a_link_out_of_the_directory_tells_no_secret(directory: Path, name: str) -> None:
    """What a repository links to may show in prompts, as the chat template does."""
    secret, link = directory.parent / "secret", directory / name
    secret.write_text("password")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(secret)
    with pytest.raises(HeadraceError, match="a link out of the model's directory"):
        load_chat_template(read_model_directory(directory), link.stem.replace("chat_template", "default"))


def test_module_is_not_read_from_above_the_directory(directory: Path) -> None:
    (directory / "modules.json").write_bytes(msgspec.json.encode([{"type": "x.Dense", "path": ".."}]))
    modules = SentenceModules.read(directory)
    assert modules.folders("Dense") == [directory]
