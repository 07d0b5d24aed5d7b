"""GGUF files in the whole engine: greedy answers and logits equal those of `transformers`; the memory is as planned.

Source: files are written by the `gguf` package of llama.cpp, whose own dequantization gives the oracle its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from gpu_worker.models.loader import load_model, weights_bytes
from gpu_worker.models.registry import read_model_config
from gpu_worker.quantization.gguf.checkpoint import GGUFCheckpoint
from kernels.linear.dense import keeps_half
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.variants import oracle_logits
from tests.gpu_worker.quantization.gguf.conftest import GGUFPair
from tests.gpu_worker.quantization.gguf.gguf_models import VARIANTS, write_model
from tests.gpu_worker.quantization.gguf.vocabularies import byte_pair_vocabulary
from tests.gpu_worker.quantization.gguf.written_file import VOCAB_SIZE
from tests.gpu_worker.quantization.test_mixtures import assert_answers_equal, oracle_tokens
from tests.integration.system import running_system

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama-mixed", "llama-F16", "qwen2", "qwen3"])
def test_greedy_answers_equal_those_of_transformers(gguf_pair: Callable[[str], GGUFPair], name: str) -> None:
    pair = gguf_pair(name)
    assert_answers_equal(pair.path, pair.oracle, dtype="float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama-mixed", "llama-F16", "qwen2"])
def test_weights_take_the_memory_that_was_expected(
    gguf_pair: Callable[[str], GGUFPair], name: str, dtype: torch.dtype
) -> None:
    path = gguf_pair(name).path
    config = read_model_config(path)
    expected = weights_bytes(path, dtype, CPU, is_tied=config.tie_word_embeddings)
    with GGUFCheckpoint(path, dtype, CPU, keeps_half=partial(keeps_half, inputs=dtype, device=CPU)) as checkpoint:
        taken = 0
        for stored, parameter in gguf_pair(name).oracle.named_parameters():
            if parameter.ndim == 1 or "embed_tokens" in stored or config.quantization is None:
                taken += checkpoint.take(stored, *parameter.shape).nbytes
            else:
                form = config.quantization.take(checkpoint, stored.removesuffix(".weight"), *parameter.shape)
                taken += form.num_bytes
        checkpoint.check_all_taken()
    assert taken == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "directory"])
def test_headrace_up_serves_a_gguf_file(tmp_path: Path, is_directory: bool) -> None:
    vocabulary = byte_pair_vocabulary("qwen2")
    (tmp_path / "tiny").mkdir()
    path = tmp_path / "tiny" / "tiny-model.gguf"
    oracle = write_model(path, "qwen2", vocabulary, vocab_size=len(vocabulary.tokens))
    prompt = "The quick brown fox, 日本"
    expected = oracle_tokens(oracle, vocabulary.tokenizer.encode(prompt).ids, 8)
    model = path.parent if is_directory else path
    environ = {"HEADRACE_DTYPE": "float32", "HEADRACE_NUM_BLOCKS": "64"}
    with running_system(tmp_path, "--model", str(model), environ=environ) as system:
        assert system.model == ("tiny" if is_directory else "tiny-model")
        answer = system.client().completions.create(
            model=system.model, prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
    assert answer.choices[0].text == vocabulary.tokenizer.decode(expected)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


LENGTHS = (70, 23)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(gguf_pair: Callable[[str], GGUFPair], name: str) -> None:
    pair = gguf_pair(name)
    sequences = [torch.randint(VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    model = load_model(pair.path, torch.float32, CPU)
    run = PagedRun(model, sequences)
    # A prompt in two chunks beside another, then decodes.
    computed = run.steps([{0: 50, 1: 20}, {0: 17}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}])
    exact_oracle = copy.deepcopy(pair.oracle).double()
    for logits, sequence in zip(computed, sequences, strict=True):
        exact = oracle_logits(exact_oracle, sequence).double()
        assert exact.std() > 0.5
        rounding = (oracle_logits(pair.oracle, sequence) - exact).abs().max()
        assert rounding < 1e-3
        assert (logits - exact).abs().max() < 4 * rounding
