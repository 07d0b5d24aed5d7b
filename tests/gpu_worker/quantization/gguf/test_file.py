"""Parsing: what the `gguf` package writes is read as it reads it, and every lie in a file is a `GGUFError`.

Mutated files are read, or refused with a `GGUFError`: nothing else happens, and little memory is taken.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.models.loader import load_model
from gpu_worker.models.revision import model_revision
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.checkpoint import GGUFMethod
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.quantization.gguf.tensor_types import F16, TensorType
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from kernels.linear.forms import DenseWeight
from shared.errors import ConfigError, HeadraceError
from tests.gpu_worker.quantization.gguf.conftest import GGUFPair
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.gguf.vocabularies import byte_pair_vocabulary, sentencepiece_vocabulary
from tests.gpu_worker.quantization.gguf.written_file import written


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(name: str | bytes, dimensions: Sequence[int] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file(
    fields: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_fields: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Put a file together; counts that are given replace the true ones."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(fields) if num_fields is None else num_fields)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


HUGE = 2**63
U32 = struct.Struct("<I")
VALUES: dict[str, tuple[gguf.GGUFValueType, Any]] = {
    "a.uint8": (gguf.GGUFValueType.UINT8, 255), "a.int8": (gguf.GGUFValueType.INT8, -128),
    "a.uint16": (gguf.GGUFValueType.UINT16, 65535), "a.int16": (gguf.GGUFValueType.INT16, -32768),
    "a.uint32": (gguf.GGUFValueType.UINT32, 2**32 - 1), "a.int32": (gguf.GGUFValueType.INT32, -(2**31)),
    "a.uint64": (gguf.GGUFValueType.UINT64, 2**64 - 1), "a.int64": (gguf.GGUFValueType.INT64, -(2**63)),
    "a.float32": (gguf.GGUFValueType.FLOAT32, 0.25), "a.float64": (gguf.GGUFValueType.FLOAT64, 1e300),
    "a.bool": (gguf.GGUFValueType.BOOL, True), "a.string": (gguf.GGUFValueType.STRING, "naïve 日本 🏳️‍🌈"),
}  # fmt: skip
ARRAYS: dict[str, list[Any]] = {
    "b.numbers": [1, -2, 3], "b.floats": [0.5, -1.5], "b.bools": [True, False], "b.strings": ["", "x", "▁y"],
    "b.empty_strings": ["", ""], "b.nested": [[1, 2], [3]],
}  # fmt: skip


def read(path: Path, content: bytes) -> GGUFFile:
    path.write_bytes(content)
    with GGUFFile(path) as opened:
        return opened


def test_all_value_types_are_read(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    with written(path, "llama") as writer:
        for key, (kind, value) in VALUES.items():
            writer.add_key_value(key, value, kind)
        for key, values in ARRAYS.items():
            writer.add_array(key, values)
    with GGUFFile(path) as opened:
        fields = opened.metadata.fields
    assert {key: fields[key] for key in VALUES} == {key: value for key, (_, value) in VALUES.items()}
    assert {
        key: [getattr(item, "tolist", lambda item=item: item)() for item in fields[key]] for key in ARRAYS
    } == ARRAYS
    assert fields["general.architecture"] == "llama"


def test_tensors_are_where_the_gguf_package_finds_them(gguf_pair: Callable[[str], GGUFPair]) -> None:
    path = gguf_pair("llama-mixed").path
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as opened:
        assert list(opened.tensors) == [item.name for item in reader.tensors]
        for expected in reader.tensors:
            info = opened.tensors[expected.name]
            assert info.type.number == expected.tensor_type
            assert info.shape == tuple(expected.shape.tolist()[::-1])
            assert (info.offset, info.num_bytes) == (expected.data_offset, expected.n_bytes)
            rows = info.num_bytes // info.row_bytes
            assert opened.rows(info, 0, rows).tobytes() == expected.data.tobytes()
            assert opened.rows(info, rows - 1, 1).tobytes() == expected.data.tobytes()[-info.row_bytes :]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_versions_and_alignments_are_read(tmp_path: Path, version: int, alignment: int) -> None:
    fields = [field("general.alignment", 4, U32.pack(alignment))]
    values = np.arange(32, dtype=np.float32)
    content = file(fields, [tensor("x")], values.tobytes(), version=version, alignment=alignment)
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with GGUFFile(path) as opened:
        assert opened.rows(opened.tensors["x"], 0, 1).view(np.float32)[0].tolist() == values.tolist()


TENSOR = tensor("x")
DATA = bytes(128)
NAMED = field("k", 4, U32.pack(1))
LIES = {
    "empty file": (b"", "the magic number needs 4 bytes at byte 0, but the file ends at byte 0; copy it again"),
    "other format": (b"PK\x03\x04" + bytes(60), "a GGUF file begins with"),
    "version 1": (file(version=1), "the version is 1; supported: 2 and 3"),
    "version 4": (file(version=4), "the version is 4; supported: 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "only the magic": (b"GGUF", "the version needs 4 bytes"),
    "2^63 tensors": (file(num_tensors=HUGE), "at most 65536"),
    "2^63 fields": (file(num_fields=HUGE), "at most 65536"),
    "more fields than there are": (file([NAMED], num_fields=2), "has 0 characters"),
    "more tensors than there are": (file([], [TENSOR], DATA, num_tensors=60000), "a name that is not 1 to 64"),
    "key of 2^63 bytes": (file([struct.pack("<Q", HUGE) + b"k"]), "metadata field 0 needs 9223372036854775808 bytes"),
    "empty key": (file([field("", 4, U32.pack(1))]), "has 0 characters"),
    "key that is not UTF-8": (file([field(b"\xff\xfe", 4, U32.pack(1))]), "not UTF-8"),
    "key twice": (file([NAMED, NAMED]), "'k' occurs twice"),
    "value type 13": (file([field("k", 13, bytes(8))]), "value type 13"),
    "boolean of 2": (file([field("k", 7, b"\x02")]), "boolean of value 2"),
    "string of 2^63 bytes": (file([field("k", 8, struct.pack("<Q", HUGE))]), "needs 9223372036854775808 bytes"),
    "string that is not UTF-8": (file([field("k", 8, text(b"\xc3\x28"))]), "not UTF-8"),
    "array of 2^63 numbers": (file([field("k", 9, array(4, HUGE, b""))]), "needs 36893488147419103232 bytes"),
    "array of 2^61 numbers of 8 bytes": (file([field("k", 9, array(10, 2**61, b""))]), "needs"),
    "array of 2^63 strings": (file([field("k", 9, array(8, HUGE, b""))]), "names 9223372036854775808 items"),
    "array of 2^63 arrays": (file([field("k", 9, array(9, HUGE, b""))]), "names 9223372036854775808 items"),
    "array of an unknown type": (file([field("k", 9, array(77, 1, bytes(8)))]), "value type 77"),
    "arrays 9 deep": (file([field("k", 9, array(9, 1, b"") * 9)], data=bytes(64)), "more than 4 deep"),
    "100,000 arrays": (file([field("k", 9, array(9, 100_000, array(0, 0, b"") * 100_000))]), "more than 65536 of them"),
    "alignment of 24": (file([field("general.alignment", 4, U32.pack(24))]), "must be a power of two"),
    "alignment of 0": (file([field("general.alignment", 4, U32.pack(0))]), "from 8 to"),
    "alignment of 2^31": (file([field("general.alignment", 4, U32.pack(2**31))]), "from 8 to"),
    "alignment of text": (file([field("general.alignment", 8, text("32"))]), "must be a whole number"),
    "no dimensions": (file([], [tensor("x", ())], DATA), "has 0 dimensions"),
    "5 dimensions": (file([], [tensor("x", (1,) * 5)], DATA), "has 5 dimensions"),
    "2^32-1 dimensions": (file([], [text("x") + b"\xff" * 24], DATA), "has 4294967295 dimensions"),
    "a dimension of 0": (file([], [tensor("x", (32, 0))], DATA), "each must be at least 1"),
    "dimensions that overflow": (file([], [tensor("x", (2**32, 2**32))], DATA), "ends at byte"),
    "2^63 columns": (file([], [tensor("x", (HUGE,))], DATA), "ends at byte"),
    "unsupported type": (
        file([], [tensor("x", (256,), 19)], DATA),
        "'x' has type IQ1_S; supported: F32, F16, BF16, Q4_0",
    ),
    "unknown type": (file([], [tensor("x", (256,), 999)], DATA), "has type number 999; supported"),
    "half a block": (file([], [tensor("x", (48,), 2)], DATA), "Q4_0 needs a multiple of 32"),
    "offset of 2^63": (file([], [tensor("x", offset=HUGE)], DATA), "ends at byte"),
    "offset of 2^64-32": (file([], [tensor("x", offset=2**64 - 32)], DATA), "ends at byte"),
    "offset that is not aligned": (file([], [tensor("x", offset=4)], DATA), "no multiple of the alignment"),
    "data beyond the end": (file([], [TENSOR], DATA[:-1]), "the file has 191; copy it again"),
    "tensor twice": (file([], [TENSOR, tensor("x", offset=128)], DATA * 2), "'x' occurs twice"),
    "overlapping tensors": (file([], [TENSOR, tensor("y", offset=96)], DATA * 2), "'y' overlaps tensor 'x'"),
    "tensors in one place": (file([], [TENSOR, tensor("y")], DATA), "overlaps"),
    "tensor name of 65 letters": (file([], [tensor("x" * 65)], DATA), "1 to 64 letters"),
    "tensor name that is a path": (file([], [tensor("../x")], DATA), "1 to 64 letters"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lie_is_named(tmp_path: Path, lie: str) -> None:
    content, problem = LIES[lie]
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as raised:
            read(tmp_path / "lie.gguf", content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert problem in str(raised.value)
    assert raised.value.path == tmp_path / "lie.gguf"
    assert isinstance(raised.value, HeadraceError)
    assert peak < 16 * len(content) + (1 << 20)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    fields = [field("k", 9, array(8, 2, text("a") + text("b"))), NAMED.replace(b"k", b"n")]
    content = file(fields, [TENSOR, tensor("y", (32, 2), 8, offset=128)], bytes(128 + 68))
    read(tmp_path / "whole.gguf", content)
    for size in range(len(content)):
        with pytest.raises(GGUFError):
            read(tmp_path / "cut.gguf", content[:size])


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(file([], [tensor("x", (32, 4096))], DATA * 4096))
    with GGUFFile(path) as opened:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(GGUFError, match="tensor 'x' was cut off while it was read; load again"):
            opened.rows(opened.tensors["x"], 0, 4096)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"none\.gguf: the file cannot be read"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(GGUFError, match="cannot be read"):
        GGUFFile(tmp_path)


def test_file_and_its_directory_are_found(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    assert find_gguf(file) == file
    assert find_gguf(tmp_path) == file


def test_directory_in_hugging_faces_format_is_left_alone(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "config.json"):
        (tmp_path / name).touch()
    assert find_gguf(tmp_path) is None


@pytest.mark.parametrize("name", ["none", "none.gguf", "model.safetensors"])
def test_other_paths_are_no_gguf_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path / name) is None
    with pytest.raises(
        ConfigError, match=r"name a folder in Hugging Face's format, a \.gguf file, or an id at the hub"
    ):
        read_model_directory(tmp_path / name)


def test_directory_with_two_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\); name one of them"):
        find_gguf(tmp_path)


def test_revision_follows_the_files_content(gguf_pair: Callable[[str], GGUFPair], tmp_path: Path) -> None:
    path = Path(shutil.copy(gguf_pair("llama-Q8_0").path, tmp_path / "model.gguf"))
    before = model_revision(path, "auto")
    assert model_revision(tmp_path, "auto") == before
    content = bytearray(path.read_bytes())
    content[:4096] = bytes(4096)
    path.write_bytes(content)
    assert model_revision(path, "auto") != before


@pytest.mark.parametrize("types", [{}, {"layer.weight": F16}])
def test_layer_that_is_not_quantized_is_taken_by_its_outputs_and_inputs(types: dict[str, TensorType]) -> None:
    weight = torch.randn(6, 4)
    source = Mock(take=Mock(return_value=weight))
    taken = GGUFMethod(types).take(source, "layer", 6, 4)
    assert isinstance(taken, DenseWeight)
    assert taken.weight is weight
    source.take.assert_called_once_with("layer.weight", 6, 4)


MAX_BYTES = 8 << 20
SMALL = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
NUMBERS = [0, 1, 2, 3, 7, 8, 9, 31, 127, 2**8, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1]
SHARED_PATH = [HealthCheck.function_scoped_fixture]


def _write(path: Path, vocabulary: Callable[[Any], None], size: int) -> bytes:
    write_model(path, "llama-Q8_0", vocabulary, vocab_size=size, **SMALL)
    return path.read_bytes()


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def content(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    make = {"gpt2": byte_pair_vocabulary, "llama": sentencepiece_vocabulary}[request.param]
    vocabulary = make()
    return _write(tmp_path_factory.mktemp("fuzz") / "model.gguf", vocabulary, len(vocabulary.tokens))


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """One to four changes, most of them in the header: bits, numbers, cuts, and pieces of the file moved elsewhere."""
    steps = draw(st.lists(st.tuples(st.sampled_from("bncs"), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4))
    number = draw(st.sampled_from(NUMBERS))
    width = draw(st.sampled_from([1, 4, 8]))
    bit = draw(st.integers(0, 7))

    def mutate(data: bytes) -> bytes:
        for kind, where, other in steps:
            # Squared, so that the small numbers at the beginning are hit often.
            at, source = int(where**2 * len(data)), int(other**2 * len(data))
            if kind == "b":
                data = data[:at] + bytes(byte ^ (1 << bit) for byte in data[at : at + 1]) + data[at + 1 :]
            elif kind == "n":
                data = data[:at] + (number % 256**width).to_bytes(width, "little") + data[at + width :]
            elif kind == "c":
                data = data[:at]
            else:
                data = data[:at] + data[source : source + 64] + data[at:]
        return data

    return mutate


def _peak_of(action: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@settings(max_examples=100, suppress_health_check=SHARED_PATH)
@given(mutate=mutations())
def test_mutated_file_is_read_or_refused(content: bytes, mutate: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "mutated.gguf"
    path.write_bytes(mutate(content))

    def read() -> None:
        with contextlib.suppress(GGUFError), GGUFFile(path) as file:
            for info in file.tensors.values():
                assert len(file.rows(info, 0, 1)[0]) == info.row_bytes

    assert _peak_of(read) < MAX_BYTES


@settings(max_examples=100, suppress_health_check=SHARED_PATH)
@given(mutate=mutations())
def test_model_of_a_mutated_file_is_loaded_or_refused(
    content: bytes, mutate: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "mutated.gguf"
    path.write_bytes(mutate(content))
    with contextlib.suppress(GGUFError):
        load_model(path, torch.float32, torch.device("cpu"), max_model_len=32)
    # The tokenizers library and the chat template have errors of their own, which the worker reports as a setting's.
    with contextlib.suppress(GGUFError, ConfigError):
        ModelTokenizer(read_model_directory(path)).encode_text("some text, 日本\n")
