"""Adapters that are broken, hostile, of another kind or another model are refused with one sentence."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.adapters import config
from gpu_worker.adapters.config import AdapterConfig, AdapterError, parse_modules, read_config
from gpu_worker.adapters.reader import check_adapter, read_packed
from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.models.json_file import CheckpointError
from shared.adapter_calls import MAX_ADAPTERS
from shared.adapter_files import content_digest
from shared.errors import ConfigError
from tests.gpu_worker.adapters.peft_files import write_adapter

_MODULE = "model.layers.0.mlp.down_proj"
_A = f"base_model.model.{_MODULE}.lora_A.weight"
_B = f"base_model.model.{_MODULE}.lora_B.weight"
_A_BYTES, _B_BYTES = 4 * 4 * 12, 4 * 8 * 4
_HEAD, _WORDS = (f"base_model.model.{name}.base_layer.weight" for name in ("lm_head", "model.embed_tokens"))

_DIAGONAL, _MAGNITUDE = (f"base_model.model.{_MODULE}.{name}" for name in ("lora_diag", "lora_magnitude_vector"))
_RESIZED = "base_model.model.model.embed_tokens.weight"


@pytest.fixture
def targets() -> AdapterTargets:
    targets = AdapterTargets(4, torch.device("cpu"), torch.float32)
    targets.add((_MODULE,), (8,), 12)
    targets.add(("lm_head",), (5,), 12)
    return targets


def _set(**fields: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        tensors = load_file(directory / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, directory / "adapter_model.safetensors")

    return changed


def _rename(directory: Path) -> None:
    _tensors(lambda tensors: tensors.update({_A.replace("lora_A", "lora_C"): tensors.pop(_A)}))(directory)


def _of(module: str) -> Callable[[Path], None]:
    """Name the module of the adapter `module`."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in (_A, _B):
            tensors[name.replace(_MODULE, module)] = tensors.pop(name)

    return _tensors(change)


def _file(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / "adapter_model.safetensors").write_bytes(content)


def _entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _header(*entries: tuple[str, dict[str, Any]], num_bytes: int = _A_BYTES + _B_BYTES) -> Callable[[Path], object]:
    """Write a header of these tensors, of which several may have one name, and zeros."""
    fields = ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries)
    header = f"{{{fields}}}".encode()
    return _file(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


def _vast(directory: Path) -> None:
    """Write a header that is longer than any, and takes no room on the disk."""
    _file(struct.pack("<Q", 99_000_000))(directory)
    os.truncate(directory / "adapter_model.safetensors", 99_000_008)


def _escaped(write: Callable[[Path], object]) -> Callable[[Path], None]:
    """Write the same with the fields of one tensor spelled in another way."""

    def change(directory: Path) -> None:
        write(directory)
        path = directory / "adapter_model.safetensors"
        length, content = struct.unpack("<Q", path.read_bytes()[:8])[0], path.read_bytes()[8:]
        header = content[:length].replace(b"data_offsets", b"data\\u005foffsets", 1)
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[length:])

    return change


_GOOD_A, _GOOD_B = (_A, _entry([4, 12], 0, _A_BYTES)), (_B, _entry([8, 4], _A_BYTES, _A_BYTES + _B_BYTES))
_EMPTY = _entry([0], 0, 0)
_MANY = b"".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' % number for number in range(20_009))
_LONG = "base_model.model.model.layers.0." + "experts.0." * 50_000 + "\n"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_header(_GOOD_A, (_B, _entry([8, 4], 0, _B_BYTES)), num_bytes=_A_BYTES), "not a whole safetensors file"),
        (_header(_GOOD_A, _GOOD_B, num_bytes=_A_BYTES), "not a whole safetensors file"),
        (_header(_GOOD_A, _GOOD_B, num_bytes=_A_BYTES + _B_BYTES + 1), "not a whole safetensors file"),
        (_header((_A, _entry([4, 12], 0, _A_BYTES, "BF16")), _GOOD_B), "not a whole safetensors file"),
        (_header((_A, _entry([4, 12], 0, _A_BYTES, "F7")), _GOOD_B), "not a whole safetensors file"),
        (_header((_A, _entry([2**62, 4], 0, 0)), _GOOD_B), "not a whole safetensors file"),
        (_header((_A, _entry([-4, -12], 0, _A_BYTES)), _GOOD_B), "not a whole safetensors file"),
        (_header(("a\n" * 10**6, _entry([4, 12], 5, _A_BYTES)), _GOOD_B), "not a whole safetensors file"),
        (_header((_A, _entry([4, 12], 0, _A_BYTES, "I32")), _GOOD_B), "float32, float16 and bfloat16"),
        (_header((_A, _entry([12, 4], 0, _A_BYTES)), _GOOD_B, _GOOD_A), "lora_A.weight' twice in its header"),
        (
            _header((_A, {"extra": "data_offsets", **_GOOD_A[1]}), _GOOD_B, _GOOD_B),
            "lora_B.weight' twice in its header",
        ),
        (_escaped(_header(_GOOD_A, (_B, _EMPTY), _GOOD_B)), "lora_B.weight' twice in its header"),
        (_header(_GOOD_A, _GOOD_B, (_LONG, _EMPTY)), "more than 512 characters"),
        (_vast, "bytes and 20008 tensors are read"),
        (_file(struct.pack("<Q", len(_MANY) + 1) + b"{" + _MANY[:-1] + b"}"), "bytes and 20008 tensors are read"),
        (_set(lora_alpha=1e300), "1000000000 at most"),
        (_set(alpha_pattern={"down_proj": 1e300}), "1000000000 at most"),
        (_set(target_parameters=["a"] * 10_001), "at most 10000 are read"),
        (_set(peft_type="LOHA"), "only LORA is served"),
        (_set(use_dora=True), "DoRA"),
        (_set(bias="all"), "biases"),
        (_set(use_bdlora={"nblocks": 2, "match_strict": True}), "BD-LoRA"),
        (_set(kasa_config={"beta": 1e-4, "gamma": 1e-3}), "KaSA"),
        (_set(bias="lora_only"), "biases"),
        (_set(trainable_token_indices={"embed_tokens": [3]}), "tokens that were trained whole"),
        (_set(init_lora_weights="loftq"), "save it converted"),
        (_tensors(lambda tensors: tensors.update({_DIAGONAL: torch.ones(4)})), "neither lora_A nor lora_B"),
        (_tensors(lambda tensors: tensors.update({_MAGNITUDE: torch.ones(8)})), "DoRA is not served"),
        (_set(modules_to_save=["lm_head"]), "whole modules"),
        (_set(init_lora_weights="pissa_niter_4"), "save it converted"),
        (_of("mtp.layers.0.mlp.down_proj"), "no such linear layer"),
        (_of("depth_decoder.model.layers.0.mlp.down_proj"), "no such linear layer"),
        (_of("model.sam_model.layers.0.mlp.down_proj"), "no such linear layer"),
        (_of("draft_lm_head"), "no such linear layer"),
        (_set(r=257), "from 1 to 256"),
        (_set(r=True), "from 1 to 256"),
        (_set(r=10**30), "field 'r' is 1000000000000000000000000000000; it must be a whole number from 1 to 256"),
        (_set(rank_pattern={"down_proj": 10**30}), "rank_pattern"),
        (_set(lora_alpha=-1), "above 0"),
        (_set(rank_pattern={"(a+)+$": 3}), "only names of modules are read"),
        (_set(rank_pattern={"down_proj": 2.5}), "whole number"),
        (_set(r=8), "has to be [8, 12]"),
        (_file(b""), "not a whole safetensors file"),
        (_file(struct.pack("<Q", 2**62) + b"{}"), "not a whole safetensors file"),
        (_file(struct.pack("<Q", 10) + b'{"a":[[[[['), "not a whole safetensors file"),
        (_rename, "neither lora_A nor lora_B"),
        (_tensors(lambda tensors: tensors.pop(_A)), "no lora_A"),
        (_tensors(lambda tensors: tensors[_A].fill_(float("nan"))), "not finite"),
        (_tensors(lambda tensors: tensors.update({_A: tensors[_A].double()})), "float32, float16 and bfloat16"),
        (_tensors(lambda tensors: tensors.clear()), "has no matrices"),
        (_tensors(lambda tensors: tensors.update({_HEAD: torch.ones(6, 12)})), "that of this model has [5, 12]"),
        (_tensors(lambda tensors: tensors.update({_WORDS: torch.ones(5, 12)})), "neither lora_A nor lora_B"),
        (
            _tensors(lambda tensors: tensors.update({_RESIZED: torch.ones(6, 12)})),
            "tokens that were added to the tokenizer",
        ),
        (lambda directory: (directory / "adapter_model.safetensors").unlink(), "is missing"),
        (lambda directory: (directory / "adapter_config.json").write_text("["), "not valid JSON"),
    ],
)
def test_adapter_is_refused(
    change: Callable[[Path], object], problem: str, targets: AdapterTargets, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", {_MODULE: (8, 12)})
    change(tmp_path / "adapter")
    with pytest.raises(AdapterError) as raised:
        read_packed(tmp_path / "adapter", targets, ())
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)
    # Clients read it, and the directory is the worker's own.
    assert str(tmp_path) not in str(raised.value)
    assert len(str(raised.value)) < 1000
    if problem != "not finite":
        # Nothing but numbers is needed for that.
        with pytest.raises(AdapterError, match=f"^{re.escape(str(raised.value))}$"):
            check_adapter(tmp_path / "adapter", targets)


def test_adapter_is_checked_without_its_numbers(targets: AdapterTargets, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {_MODULE: (8, 12)})
    weights = adapter / "adapter_model.safetensors"
    size, length = weights.stat().st_size, struct.unpack("<Q", weights.read_bytes()[:8])[0]
    os.truncate(weights, 8 + length)
    os.truncate(weights, size)
    check_adapter(adapter, targets)


def test_patterns_are_not_compared_with_very_many_modules(
    targets: AdapterTargets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_MAX_COMPARED", 1)
    write_adapter(tmp_path / "adapter", {_MODULE: (8, 12)})
    _set(rank_pattern={"down_proj": 4}, target_parameters=["x"] * 10_000)(tmp_path / "adapter")
    read_packed(tmp_path / "adapter", targets, ())
    _set(alpha_pattern={"down_proj": 4})(tmp_path / "adapter")
    with pytest.raises(AdapterError, match="has 2 patterns for 1 modules; at most 1 pairs are compared"):
        read_packed(tmp_path / "adapter", targets, ())


@pytest.mark.parametrize("sizes", [{"model.layers.7.mlp.down_proj": (8, 12)}, {_MODULE: (9, 12)}, {_MODULE: (8, 11)}])
def test_adapter_of_another_model_is_refused(
    sizes: dict[str, tuple[int, int]], targets: AdapterTargets, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", sizes)
    with pytest.raises(AdapterError, match=r"no such linear layer|has to be"):
        read_packed(tmp_path / "adapter", targets, ())


def test_matrix_that_latent_attention_has_multiplied_into_others_is_refused_as_such(
    targets: AdapterTargets, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.kv_b_proj": (8, 12)})
    with pytest.raises(AdapterError, match="kv_b_proj of latent attention: train it without"):
        read_packed(tmp_path / "adapter", targets, ())


@pytest.mark.parametrize("part", ["adapter_config.json", "adapter_model.safetensors"])
def test_any_change_of_content_changes_the_digest(part: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, {_MODULE: (8, 12)})
    before = content_digest(adapter)
    (adapter / part).write_bytes((adapter / part).read_bytes() + b" ")
    assert content_digest(adapter) != before


@pytest.mark.parametrize("text", ["a", "a=", "=b", "a=b,a=c", f"{'0' * 64}=b", f"{'n' * 129}=b"])
def test_malformed_modules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_LORA_MODULES"):
        parse_modules(text)


def test_modules_are_separated_by_commas_or_spaces() -> None:
    assert parse_modules("a=/x b=/y,c=/z/=") == {"a": Path("/x"), "b": Path("/y"), "c": Path("/z/=")}


_NAMES = (
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.0.mlp.up_proj",
)
_KEYS = (
    *("q_proj", "^q_proj", "q_proj$", "^q_proj$", "self.attn.q_proj", r"self\.attn.q_proj", r"self_attn\.q_proj"),
    *(r".*\.q_proj", r"^.*\.q_proj$", r".*\.up_proj", "up_proj", "layers.0.mlp.up_proj", "0.self_attn.q_proj"),
    *("^model.layers.0.self_attn.q_proj", "^layers.0.self_attn.q_proj", "...", "proj", ".q_proj", r".*\.....q_proj"),
)


def _read(directory: Path, **fields: Any) -> AdapterConfig:
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return read_config(directory)


@pytest.mark.parametrize("key", _KEYS)
def test_patterns_match_as_expressions_do(key: str, tmp_path: Path) -> None:
    config = _read(tmp_path, alpha_pattern={key: 7}, rank_pattern={key: 7})
    expected = [7 if re.match(rf"(.*\.)?({key})$", name) else 1 for name in _NAMES]
    assert [config.rank_of(name) for name in _NAMES] == expected


def test_the_first_pattern_that_matches_counts(tmp_path: Path) -> None:
    config = _read(tmp_path, alpha_pattern={"0.self_attn.q_proj": 7, "q_proj": 2, r".*\.q_proj": 3})
    assert [config.scale_of(name) for name in _NAMES] == [2, 7, 2, 1, 1]
    path = tmp_path / "adapter_config.json"
    path.write_text(path.read_text().replace("lora_alpha", "other"))
    assert read_config(tmp_path).scale_of(_NAMES[-1]) == 8


@pytest.mark.parametrize("key", [r"layers\.\d+\.q_proj", "q_proj|k_proj", ".*q_proj", "q_proj\n", "", r"a\\b", "(a+)+"])
def test_other_expressions_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"field 'alpha_pattern' has the pattern .*only names of modules are read"
    ):
        _read(tmp_path, alpha_pattern={key: 7})


def test_parameters_are_matched_by_their_own_names(tmp_path: Path) -> None:
    patterns = {"q_proj": 3, "gate.weight": 5, "experts": 7, "down_proj": 9}
    parameters = ["mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    config = _read(tmp_path, alpha_pattern=patterns, target_parameters=parameters)
    names = ("layers.0.q_proj", "layers.0.mlp.gate", "layers.0.gate")
    assert [config.scale_of(name) for name in names] == [3, 5, 1]
    stacks = [config.stack_name("layers.0.mlp.experts", own) for own in (["gate_up_proj", "up_proj"], ["down_proj"])]
    assert [config.scale_of(name) for name in stacks] == [1, 9]
    with pytest.raises(AdapterError, match="target_parameters has to name one of gate_up_proj, up_proj"):
        _read(tmp_path, alpha_pattern=patterns).stack_name("layers.0.mlp.experts", ["gate_up_proj", "up_proj"])


def test_more_modules_than_can_be_named_are_refused() -> None:
    modules = [f"n{number}=/x" for number in range(MAX_ADAPTERS + 1)]
    assert len(parse_modules(",".join(modules[:-1]))) == MAX_ADAPTERS
    with pytest.raises(ConfigError, match=f"has {MAX_ADAPTERS + 1} adapters; at most {MAX_ADAPTERS} are served"):
        parse_modules(",".join(modules))


@pytest.mark.parametrize("before", ["", "language_model.model.", "model.language_model.", "model.text_model."])
def test_layers_of_a_wrapped_decoder_are_the_models(tmp_path: Path, targets: AdapterTargets, before: str) -> None:
    directory = write_adapter(tmp_path / "adapter", {_MODULE: (8, 12)})
    _of(f"{before}layers.0.mlp.down_proj")(directory)
    read_packed(directory, targets, ())


def test_fields_that_change_no_product_are_read(tmp_path: Path) -> None:
    fields = {"fan_in_fan_out": True, "layers_to_transform": [0, 2], "layers_pattern": "layers", "lora_dropout": 0.1}
    fields |= {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "velora_config": {"num_groups": 4}}
    found = _read(tmp_path, **fields, ensure_weight_tying=True, loftq_config={}, modules_to_save=None)
    assert (found.rank_of("q_proj"), found.scale_of("q_proj")) == (1, 1)
    assert _read(tmp_path, init_lora_weights="mica", runtime_config={"ephemeral_gpu_offload": False}) == found


def test_configuration_of_later_releases_is_read(tmp_path: Path) -> None:
    fields = {"target_modules": "all-linear", "exclude_modules": r"(?:.*\.)?layers\.[0-3]\..*", "peft_version": "9.9"}
    assert _read(tmp_path, **fields, some_later_field={"a": [1]}).rank_of("q_proj") == 1
