"""What the worker must know of a model before it loads one, read without torch from its directory or GGUF file."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import msgspec

from gpu_worker.models.json_file import read_small_file
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.metadata import end_token_ids, token_id
from gpu_worker.quantization.gguf.model_facts import model_facts
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.quantization.gguf.tensor_names import ENCODERS
from gpu_worker.text.gguf_tokenizer import tokenizer_config, tokenizer_json
from shared.bounds import MAX_TOKEN_ID
from shared.errors import ConfigError, HeadraceError
from shared.messages import UNDECODABLE
from shared.model_hub import check_is_model
from shared.sampling import SamplingDefaults

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model's directory, or its GGUF file, and the facts from there.

    Attributes:
        vocab_size: Token ids the model can produce: `0 ... vocab_size - 1`.
        max_model_len: Context length the model was made for, in tokens.
        pooling_type, is_encoder, num_classes: Of a GGUF file, as in `ModelFacts`.
        sampling_defaults: What `generation_config.json` advises for requests that do not say.
        bos_token_id: Token that stands for an empty prompt, if the model names one.
        tokenizer_config: Content of `tokenizer_config.json`, or what it would be; empty when there is none.
    """

    path: Path
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    tokenizer_config: dict[str, Any]
    hidden_size: int
    pooling_type: int | None = None
    is_encoder: bool = False
    num_classes: int = 0
    sampling_defaults: SamplingDefaults | None = None

    def read_tokenizer(self) -> bytes:
        """Read the tokenizer, in the form of `tokenizer.json`; `HeadraceError` if it is missing or not supported."""
        if self.path.is_file():
            with GGUFFile(self.path) as file:
                return tokenizer_json(file.metadata)
        try:
            return read_small_file(self.path / "tokenizer.json")
        except OSError as error:
            raise ConfigError("HEADRACE_MODEL", f"{error.filename} cannot be read: {error.strerror}") from None


def read_model_directory(path: Path) -> ModelDirectory:
    """Read a model's configuration, of a directory in either format or a GGUF file; `HeadraceError` if unusable."""
    gguf = find_gguf(path)
    return _with_known_ids(_read_folder(path) if gguf is None else _read_gguf(gguf))


def _with_known_ids(read: ModelDirectory) -> ModelDirectory:
    """Drop special tokens that the model never produces, as transformers and vLLM in effect do, and warn of them."""
    ends = frozenset(token_id for token_id in read.eos_token_ids if token_id < read.vocab_size)
    bos = read.bos_token_id if read.bos_token_id is None or read.bos_token_id < read.vocab_size else None
    unknown = sorted(read.eos_token_ids - ends) + ([] if bos == read.bos_token_id else [read.bos_token_id])
    if unknown:
        _log.warning(
            "%s names the special tokens %s, but the model has the ids 0 to %d only; they are ignored%s",
            read.path,
            ", ".join(map(str, unknown)),
            read.vocab_size - 1,
            "" if ends or not read.eos_token_ids else ", and no other ends an answer: give 'max_tokens' or 'stop'",
        )
    return replace(read, eos_token_ids=ends, bos_token_id=bos)


def _read_folder(path: Path) -> ModelDirectory:
    check_is_model(path, "HEADRACE_MODEL")
    config = read_json(path / "config.json", required=True)
    text_config = _text_part(path, config)
    generation = read_json(path / "generation_config.json")
    if not (path / "tokenizer.json").is_file():
        problem = f"{path} has no tokenizer.json; copy it from where the model came from"
        how = (
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it from an older tokenizer"
        )
        raise ConfigError("HEADRACE_MODEL", f"{problem}, or write it: {how}")
    # Of a model that also sees, the whole's tokens go before those of its text part.
    places = (generation, config, text_config)
    bos = _token_ids(path, "bos_token_id", places)
    return ModelDirectory(
        path=path,
        vocab_size=_positive(path, text_config, "vocab_size"),
        max_model_len=_positive(path, text_config, "max_position_embeddings"),
        eos_token_ids=frozenset(_token_ids(path, "eos_token_id", places)),
        bos_token_id=bos[0] if bos else None,
        tokenizer_config=read_json(path / "tokenizer_config.json"),
        hidden_size=_positive(path, text_config, "hidden_size"),
        sampling_defaults=read_sampling_defaults(generation),
    )


def _text_part(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text part of a model that also sees or hears, or else of the whole."""
    for name in ("thinker_config", "text_config", "llm_config"):
        if inner := config.get(name):
            if not isinstance(inner, dict):
                raise ConfigError("HEADRACE_MODEL", f"{name} in {path / 'config.json'} is not an object")
            config = inner
    return config


def _read_gguf(path: Path) -> ModelDirectory:
    with GGUFFile(path) as file:
        facts = model_facts(file)
        return ModelDirectory(
            path=path,
            vocab_size=facts.vocab_size,
            max_model_len=facts.context_length,
            eos_token_ids=end_token_ids(file.metadata),
            bos_token_id=token_id(file.metadata, "bos"),
            tokenizer_config=tokenizer_config(file.metadata),
            hidden_size=facts.hidden_size,
            pooling_type=facts.pooling_type,
            is_encoder=facts.architecture in ENCODERS,
            num_classes=facts.num_classes,
        )


@overload
def read_json(path: Path, *, required: bool = False) -> dict[str, Any]: ...


@overload
def read_json(path: Path, *, kind: type[list[Any]], required: bool = False) -> list[dict[str, Any]]: ...


def read_json(path: Path, *, kind: type[Any] = dict, required: bool = False) -> Any:
    """Read a file of an object or list of objects; empty if missing and not required; else `ConfigError`."""
    expected = dict[str, Any] if kind is dict else list[dict[str, Any]]
    if not path.is_file():
        if required:
            raise ConfigError("HEADRACE_MODEL", f"{path} is missing")
        return kind()
    try:
        # Published configurations have `Infinity`, which Python reads and JSON does not know.
        return msgspec.convert(json.loads(read_small_file(path)), expected)
    except (OSError, *UNDECODABLE) as error:
        problem = f"{path} is not usable: {error}; copy it again from where the model came from"
        raise ConfigError("HEADRACE_MODEL", problem) from error


def _positive(path: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not 0 < value < 2**31:
        value = _described(path, name)
    if value is None:
        raise ConfigError("HEADRACE_MODEL", f"{path / 'config.json'} has no usable {name}")
    return value


def _described(path: Path, name: str) -> int | None:
    """Return a field as the model's family defines it; None where torch is missing."""
    # Asked only about a model that cannot be read without, since this imports torch.
    try:
        registry = importlib.import_module("gpu_worker.models.registry")
    except ImportError:
        return None
    try:
        config = registry.read_model_config(path)
    except HeadraceError as error:
        raise ConfigError("HEADRACE_MODEL", str(error)) from None
    described: int = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "hidden_size": config.hidden_size,
    }[name]
    return described


def _token_ids(path: Path, name: str, places: Iterable[dict[str, Any]]) -> list[int]:
    """Return the first token id, or list of them, that one of these objects names, as a list."""
    for place in places:
        found = place.get(name)
        if found is None or found == []:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token_id) is int and 0 <= token_id <= MAX_TOKEN_ID for token_id in ids):
            problem = f"{name} of {path} is {str(found)[:80]}; it must be a token id or a list of token ids"
            raise ConfigError("HEADRACE_MODEL", problem)
        return ids
    return []


def read_sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults | None:
    """Return the sampling that `generation_config.json` advises; invalid values are left out with a warning."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(SamplingDefaults):
        value = generation_config.get(field.name)
        if value is None:
            continue
        try:
            values[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            _log.warning("generation_config.json: %s is not used: %s", field.name, error)
    return SamplingDefaults(**values) if values else None
