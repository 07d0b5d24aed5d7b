"""Loading: shards, options, and every way in which a checkpoint can be damaged or hostile."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models import decoder
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.loader import load_model, weights_bytes
from kernels.linear.dense import cpu as dense_cpu
from tests.gpu_worker.models.families.composed_cases import CASES
from tests.gpu_worker.models.families.dense_cases import longrope
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.pairs import CPU, Pair
from tests.gpu_worker.models.variants import oracle_logits, save_variant, scaled

SHARD = "model-00001-of-00001.safetensors"
TOKENS = torch.arange(3, 23)
QUERY_0 = "model.layers.0.self_attn.q_proj.weight"


def logits_of(model: CausalLM) -> torch.Tensor:
    return PagedRun(model, [TOKENS]).step({0: len(TOKENS)})[0]


def load(directory: Path) -> CausalLM:
    return load_model(directory, torch.float32, CPU)


@pytest.fixture
def directory(pair_of: Callable[[str], Pair], tmp_path: Path) -> Path:
    """A copy of the `llama` checkpoint that the test may change."""
    return shutil.copytree(pair_of("llama").directory, tmp_path / "model")


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def write_index(directory: Path, weight_map: object) -> None:
    """Turn a checkpoint of a single file into one of a single shard."""
    (directory / "model.safetensors").rename(directory / SHARD)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def wrong_shape(shape: tuple[int, ...]) -> str:
    return re.escape(f"{QUERY_0!r} has shape {list(shape)}; config.json calls for [64, 64]")


def take_all(checkpoint: Checkpoint, shapes: dict[str, torch.Size]) -> None:
    for name, shape in shapes.items():
        checkpoint.take(name, *shape)


def test_sharded_checkpoint_equals_single_file(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    save_variant("llama", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(load(tmp_path)), logits_of(pair_of("llama").model))


def test_single_file_wins_over_an_index(directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory / "kept")
    write_index(directory, {"phantom.weight": SHARD})
    (directory / "kept").rename(directory / "model.safetensors")
    load(directory)


def test_loaded_model_does_not_depend_on_its_files(directory: Path, pair_of: Callable[[str], Pair]) -> None:
    model = load(directory)
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(logits_of(model), logits_of(pair_of("llama").model))


def test_progress_counts_up_to_all_bytes(directory: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(directory, torch.float32, CPU, progress=lambda done, total: calls.append((done, total)))
    tensors = load_file(directory / "model.safetensors")
    assert len(calls) == len(tensors)
    assert calls == sorted(calls)
    assert calls[-1] == (sum(tensor.nbytes for tensor in tensors.values()),) * 2


def test_checkpoint_of_mixed_types_is_converted(directory: Path) -> None:
    types = (torch.float32, torch.bfloat16, torch.float16)
    expected = load_file(directory / "model.safetensors")
    stored = {name: tensor.to(types[index % 3]) for index, (name, tensor) in enumerate(expected.items())}
    save_file(stored, directory / "model.safetensors")
    for dtype in types:
        with Checkpoint(directory, dtype, CPU) as checkpoint:
            assert checkpoint.num_bytes_loaded("lm_head.*") == sum(
                tensor.numel() * dtype.itemsize for name, tensor in stored.items() if name != "lm_head.weight"
            )
            for name, tensor in stored.items():
                assert torch.equal(checkpoint.take(name, *tensor.shape), tensor.to(dtype))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_fused", [True, False])
def test_16_bits_in_float32_stay_16_bits_and_change_no_logit(
    directory: Path, tmp_path: Path, half: torch.dtype, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fused:
        monkeypatch.setattr(decoder, "_fusing_library", lambda *_: None)
    wide = shutil.copytree(directory, tmp_path / "wide")
    stored = {name: tensor.to(half) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(stored, directory / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in stored.items()}, wide / "model.safetensors")
    kept, widened = load(directory), load(wide)
    assert (kept.embedding.dtype, widened.embedding.dtype) == (half, torch.float32)
    assert kept.dtype is torch.float32
    assert torch.equal(logits_of(kept), logits_of(widened))
    matrices = sum(tensor.nbytes for tensor in stored.values() if tensor.dim() == 2)
    vectors = sum(2 * tensor.nbytes for tensor in stored.values() if tensor.dim() == 1)
    assert weights_bytes(directory, torch.float32, CPU, is_tied=False) == matrices + vectors


def test_16_bits_in_float32_are_widened_without_kernels(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_tensors(directory, lambda t: t.update({name: tensor.half() for name, tensor in t.items()}))
    expected = logits_of(load(directory))
    monkeypatch.setattr(decoder, "_fusing_library", lambda *_: None)
    monkeypatch.setattr(dense_cpu, "cpu_library", lambda: None)
    model = load(directory)
    assert model.embedding.dtype is torch.float32
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)


def test_fused_rows_equal_a_plain_read(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    with Checkpoint(directory, torch.float32, CPU) as checkpoint:
        rows = checkpoint.take_rows(names, [tuple(tensors[name].shape) for name in names])
    assert torch.equal(rows, torch.cat([tensors[name] for name in names]))


def test_smaller_max_model_len_bounds_the_model(directory: Path) -> None:
    assert load(directory).config.max_model_len == 128
    assert load_model(directory, torch.float32, CPU, max_model_len=50).config.max_model_len == 50
    assert load_model(directory, torch.float32, CPU, max_model_len=500).config.max_model_len == 128


def test_stored_rotary_frequencies_are_ignored(directory: Path) -> None:
    change_tensors(directory, lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(directory)


def test_stored_head_that_is_the_embedding_is_ignored(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = pair_of("llama-mha-tied")
    directory = shutil.copytree(pair.directory, tmp_path / "model")
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load(directory)
    assert model.config.tie_word_embeddings
    assert torch.equal(logits_of(model), logits_of(pair.model))


def test_stored_head_that_is_not_the_embedding_is_the_head_whatever_the_flag_says(
    pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    directory = shutil.copytree(pair_of("llama-mha-tied").directory, tmp_path / "model")
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].roll(1, 0)}))
    oracle = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    model = load(directory)
    torch.testing.assert_close(logits_of(model), oracle_logits(oracle, TOKENS), atol=1e-4, rtol=0)
    sizes = [weights_bytes(directory, torch.float32, CPU, is_tied=is_tied) for is_tied in (False, True)]
    assert sizes[model.config.tie_word_embeddings] == sizes[0] > sizes[1]


def test_tensors_of_two_shards_are_compared_where_each_is(tmp_path: Path) -> None:
    """Both stand at the same place of their files."""
    shards = {name: f"model-{number}.safetensors" for number, name in enumerate("ab")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for last in (2.0, 3.0):
        save_file({"a": torch.tensor([1.0, 2.0])}, tmp_path / shards["a"])
        save_file({"b": torch.tensor([1.0, last])}, tmp_path / shards["b"])
        with Checkpoint(tmp_path, torch.float32, CPU) as checkpoint:
            assert checkpoint.are_same("a", "b") is checkpoint.are_same("b", "a") is (last == 2.0)
            for take in (checkpoint.take, checkpoint.take_float32):
                with pytest.raises(CheckpointError, match=r"'b' has shape \[2\]; config\.json calls for \[3\]"):
                    take("b", 3)


def test_quantization_named_over_plain_numbers_is_logged(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits_of(load(directory))
    assert not caplog.messages
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    (directory / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(load(directory)), expected)
    assert [("gptq" in message, "plain numbers" in message) for message in caplog.messages] == [(True, True)]


@pytest.mark.parametrize(
    ("case", "word"),
    [(Case("Phi3", longrope(3, 32)), "LongRoPE"), (Case("Llama", scaled("dynamic", 32)), "dynamic NTK")],
)
def test_bound_at_the_trained_length_turns_short_texts_as_transformers_does_and_its_absence_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: Case, word: str
) -> None:
    oracle = save_case(case, tmp_path)
    caplog.clear()
    bounded = load_model(tmp_path, torch.float32, CPU, max_model_len=32)
    assert not caplog.messages
    torch.testing.assert_close(logits_of(bounded), oracle_logits(oracle, TOKENS), atol=1e-4, rtol=0)
    whole = load(tmp_path)
    assert [(word in message, "--max-model-len 32" in message) for message in caplog.messages] == [(True, True)]
    is_same = torch.allclose(logits_of(whole), oracle_logits(oracle, TOKENS), atol=1e-4)
    assert is_same is (word != "LongRoPE")


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (QUERY_0, None, f"no tensor '{QUERY_0}'"),
        ("lm_head.weight", None, r"no tensor 'lm_head\.weight'"),
        (
            "model.layers.3.mlp.up_proj.weight",
            torch.zeros(2, 2),
            r"'model\.layers\.3\.mlp\.up_proj\.weight', which config\.json has no",
        ),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), r"q_proj\.bias"),
        *((QUERY_0, torch.zeros(shape), wrong_shape(shape)) for shape in [(64, 63), (63, 64), (64,), (1, 64, 64)]),
        (
            QUERY_0,
            torch.zeros(64, 64, dtype=torch.int8),
            r"stored as torch\.int8; supported: float32, float16, bfloat16",
        ),
    ],
)
def test_tensor_that_is_missing_or_has_no_place_in_the_model_is_named(
    directory: Path, name: str, tensor: torch.Tensor | None, problem: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    change_tensors(directory, change)
    with pytest.raises(CheckpointError, match=problem):
        load(directory)


def test_two_tensors_of_one_place_in_the_model_are_named(tmp_path: Path) -> None:
    """Either would be taken without a word, whichever is stored last."""
    other = f"language_model.{QUERY_0}"
    save_variant("mistral", tmp_path)
    change_tensors(tmp_path, lambda t: t.update({other: torch.zeros(64, 64)}))
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    assert all(repr(name) in str(raised.value) for name in (other, QUERY_0))


@pytest.mark.parametrize("size", [0, 7, 100, 5000, -1])
def test_truncated_file_is_refused(directory: Path, size: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        load(directory)


def test_pointer_of_git_lfs_is_told_how_to_fetch_the_file(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="it is a pointer of Git LFS: run `git lfs pull`"):
        load(directory)


def test_truncated_shard_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    save_variant("llama", tmp_path, max_shard_size="60KB")
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-1])
    calls: list[tuple[int, int]] = []
    with pytest.raises(CheckpointError, match=f"{path.name}: is not a whole safetensors file"):
        load_model(tmp_path, torch.float32, CPU, progress=lambda done, total: calls.append((done, total)))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_file_that_shrinks_while_it_is_read_is_an_error(directory: Path, dtype: torch.dtype) -> None:
    path = directory / "model.safetensors"
    shapes = {name: tensor.shape for name, tensor in load_file(path).items()}
    with Checkpoint(directory, dtype, CPU) as checkpoint:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: ended while it was read"):
            take_all(checkpoint, shapes)


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("pytorch_model.bin", r"save_pretrained\(\.\.\.\) of transformers writes them from the \.bin files"),
        ("consolidated.safetensors", "is Mistral's own form: take the same model in Hugging Face's"),
    ],
)
def test_weights_in_another_form_are_refused_with_what_helps(directory: Path, file: str, remedy: str) -> None:
    (directory / "model.safetensors").rename(directory / file)
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: is missing; .* safetensors files only; .*{remedy}"
    ):
        load(directory)


def test_tensors_are_named_as_they_are_stored(tmp_path: Path) -> None:
    """The engine's own name for a tensor is in no file that the user has."""
    save_case(CASES["gpt2"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.1.ln_2.weight"
    save_file({**tensors, name: torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'transformer\.h\.1\.ln_2\.weight' has shape \[3\]"):
        load(tmp_path)
    save_file({**tensors, "transformer.h.1.ln_9.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds tensor 'transformer\.h\.1\.ln_9\.weight', .* is another model's"):
        load(tmp_path)


def test_two_tensors_that_are_the_same_to_the_model_are_refused(tmp_path: Path) -> None:
    save_case(CASES["gpt2"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "h.1.ln_2.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    both = r"holds '(transformer\.)?h\.1\.ln_2\.weight' and '(transformer\.)?h\.1\.ln_2\.weight'"
    with pytest.raises(CheckpointError, match=both):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "..safetensors",
        "model.safetensors\x00",
        "model.safetensors\n",
        "pytorch_model.bin",
        "",
    ],
)
def test_index_that_points_elsewhere_is_refused(directory: Path, name: str) -> None:
    shutil.copytree(directory, directory.parent / "other")
    write_index(directory, dict.fromkeys(load_file(directory / "model.safetensors"), name))
    with pytest.raises(CheckpointError, match=r"only \*\.safetensors files in the model's own directory"):
        load(directory)


@pytest.mark.parametrize(
    ("name", "file", "problem"),
    [
        (QUERY_0, "model-00002-of-00002.safetensors", r"model-00002-of-00002\.safetensors: is missing"),
        ("phantom.weight", SHARD, r"does not hold tensor 'phantom\.weight'"),
    ],
)
def test_index_that_names_an_absent_file_or_tensor_is_refused(
    directory: Path, name: str, file: str, problem: str
) -> None:
    write_index(directory, {**dict.fromkeys(load_file(directory / "model.safetensors"), SHARD), name: file})
    with pytest.raises(CheckpointError, match=problem):
        load(directory)


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors", {"a": 1}, {"a": [SHARD]}])
def test_malformed_index_is_refused(directory: Path, weight_map: object) -> None:
    write_index(directory, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: field 'weight_map"):
        load(directory)
