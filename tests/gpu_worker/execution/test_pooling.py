"""Vectors and scores of prompts against `transformers`: chunked, preempted, beside generation, and as graphs.

Source: the layout of `modules.json` and its folders is that of sentence-transformers, as google/embeddinggemma-300m has
it.

Layouts of models that make vectors and scores, against `transformers`: layers alone, and heads of one class.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from gpu_worker.consumer.answer import PooledAnswers
from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.graph_shapes import CapturedSteps
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.registry import read_model_config
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.model_tasks import EmbeddingForm, read_model_tasks
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.pooling import Pooling
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import load, make_device_runner
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.execution.pooled_sequences import answer, assert_logits, assert_vectors, sequence_of
from tests.gpu_worker.execution.test_encoders import saved

LENGTHS = (1, 5, 40, 90, 150)
MEAN, LAST, FIRST = PoolingPlan("mean"), PoolingPlan("last"), PoolingPlan("first")


@pytest.fixture(scope="module")
def runner(tiny: tuple[Path, Any]) -> TorchModelRunner:
    return make_runner(tiny[0])


def mixture() -> list[Sequence]:
    plans = (MEAN, LAST, FIRST, PoolingPlan("last", (3, 7)))
    return [
        sequence_of(f"{length}-{number}", random_prompt(length, length), plan)
        for length in LENGTHS
        for number, plan in enumerate(plans)
    ]


@pytest.mark.parametrize("token_budget", [512, 23])
def test_prompts_in_one_step_or_in_chunks_equal_transformers(
    tiny: tuple[Path, Any], runner: TorchModelRunner, token_budget: int
) -> None:
    sequences = mixture()
    run(runner, sequences, token_budget=token_budget, max_num_seqs=16)
    assert_vectors(tiny[1].model, sequences, tiny[1].lm_head)


def test_prompts_beside_generation_equal_transformers_and_change_no_token(
    tiny: tuple[Path, Any], runner: TorchModelRunner
) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.0)
    texts = [make_sequence(f"text-{seed}", random_prompt(9 + seed, seed), sampling) for seed in range(4)]
    alone = run(runner, texts).tokens
    sequences = mixture()
    again = [make_sequence(f"text-{seed}", random_prompt(9 + seed, seed), sampling) for seed in range(4)]
    beside = run(runner, [*again, *sequences], token_budget=31, max_num_seqs=16, arrivals_per_step=2).tokens
    assert {name: beside[name] for name in alone} == alone
    assert_vectors(tiny[1].model, sequences, tiny[1].lm_head)


def test_preempted_prompts_begin_their_sums_again(tiny: tuple[Path, Any], runner: TorchModelRunner) -> None:
    # Generating sequences take the blocks of prompts that are being summed; these start again from their first token.
    sampling = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    texts = [make_sequence(f"text-{seed}", random_prompt(20, seed), sampling) for seed in range(3)]
    sequences = [sequence_of(f"pooled-{seed}", random_prompt(140, seed), MEAN) for seed in range(2)]
    outcome = run(runner, [*texts, *sequences], token_budget=8, max_num_seqs=5, num_blocks=92, headroom_tokens=0)
    assert outcome.num_preemptions > 0
    assert any(sequence.num_preemptions for sequence in sequences)
    assert_vectors(tiny[1].model, sequences, tiny[1].lm_head)


def test_known_prefix_is_taken_where_only_the_last_vector_counts(
    tiny: tuple[Path, Any], runner: TorchModelRunner
) -> None:
    prompt = random_prompt(48, 3)
    sequences = [sequence_of("cold", prompt, LAST)]
    warm = [sequence_of(plan.rows, prompt, plan) for plan in (LAST, MEAN, FIRST)]
    run(runner, [*sequences, *warm], arrivals_per_step=1)
    assert [sequence.num_cached_tokens for sequence in warm] == [44, 0, 0]
    assert_vectors(tiny[1].model, [*sequences, *warm], tiny[1].lm_head)


def test_steps_on_padded_buffers_equal_transformers(tiny: tuple[Path, Any]) -> None:
    # The body of graphs, called as they are replayed on a GPU: each step overwrites the hidden vectors of the last.
    model = load(tiny[0], "cpu")
    device = make_device_runner(model, is_graphed=True, max_num_seqs=16, captured=CapturedSteps.ALL)
    sequences = mixture()
    run(device, sequences, token_budget=64, max_num_seqs=16)
    assert_vectors(tiny[1].model, sequences, tiny[1].lm_head)


def test_vector_that_is_no_number_fails_alone(tiny: tuple[Path, Any]) -> None:
    runner = make_runner(tiny[0])
    poison = 11
    runner.model.embedding[poison] = float("nan")
    prompts = [[poison, 5, 6], [5, 6, 7], [8, 9]]
    sequences = [sequence_of(str(number), prompt, MEAN) for number, prompt in enumerate(prompts)]
    outcome = run(runner, sequences)
    assert list(outcome.errors) == ["0"]
    assert [len(sequence.pooled) for sequence in sequences] == [0, 1, 1]


def test_mean_is_the_same_to_the_bit_however_prompts_are_divided_into_steps(runner: TorchModelRunner) -> None:
    answers = []
    for token_budget in (512, 64, 23, 7):
        sequences = [sequence_of(str(length), random_prompt(length, length), MEAN) for length in LENGTHS]
        run(runner, sequences, token_budget=token_budget, max_num_seqs=5)
        answers.append([answer(sequence).tobytes() for sequence in sequences])
    assert all(answer == answers[0] for answer in answers)


WIDTHS = (48, 112, 48)


def save_modules(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Write what sentence-transformers writes beside a model, and return the matrices behind its pooling."""
    names = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    linears = [torch.nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)]
    for place, linear in enumerate(linears, 2):
        folder = directory / f"{place}_Dense"
        folder.mkdir()
        linear.weight.data = linear.weight.data.to(dtype).float()
        save_file({"linear.weight": linear.weight.data.to(dtype)}, folder / "model.safetensors")
        fields = {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        (folder / "config.json").write_text(json.dumps(fields))
    return torch.nn.Sequential(*linears)


def vector_of(directory: Path, prompt: list[int], pooling: Pooling) -> Any:
    """Make a vector as a worker does, from the files to the numbers in the answer."""
    model = read_model_directory(directory)
    tasks = read_model_tasks(model, ModelTokenizer(model))
    assert isinstance(tasks.embedding, EmbeddingForm), tasks.unserved
    assert tasks.names == ("embed",)
    sequence = sequence_of("0", prompt, tasks.embedding.plan)
    run(make_runner(directory), [sequence], token_budget=64)
    return np.frombuffer(PooledAnswers(tasks).vector(pooling, sequence), dtype="<f4")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embedding_gemma(tmp_path: Path, dtype: torch.dtype) -> None:
    model = saved(tmp_path, "embedding-gemma")
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    dense, prompt = save_modules(tmp_path, dtype), random_prompt(41, 7)
    with torch.no_grad():
        expected = dense(model(torch.tensor([prompt])).last_hidden_state[0].mean(0))
    whole = torch.nn.functional.normalize(expected, dim=0).numpy()
    np.testing.assert_allclose(vector_of(tmp_path, prompt, Pooling(task="embed")), whole, atol=1e-4, rtol=0)
    cut = torch.nn.functional.normalize(expected[:16], dim=0).numpy()
    found = vector_of(tmp_path, prompt, Pooling(task="embed", dimensions=16))
    np.testing.assert_allclose(found, cut, atol=1e-4, rtol=0)
    found = vector_of(tmp_path, prompt, Pooling(task="embed", normalize=False))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4, rtol=0)


SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS_LENGTHS = (1, 9, 120)
FAMILIES = ("Llama", "Qwen2", "Qwen3")


def models_saved(directory: Path, family: str, head: str, **options: Any) -> Any:
    """Save a random model and return it."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, family + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    model.save_pretrained(directory)
    return model


def pooled(directory: Path, plan: PoolingPlan) -> list[Sequence]:
    """Let the engine compute prompts of all lengths, in chunks of 50 tokens."""
    sequences = [sequence_of(str(length), random_prompt(length, length), plan) for length in MODELS_LENGTHS]
    run(make_runner(directory), sequences, token_budget=50)
    return sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", ["last", "mean"])
def test_layers_alone_give_the_vectors_of_transformers(tmp_path: Path, family: str, rows: Any) -> None:
    model = models_saved(tmp_path, family, "Model")
    assert_vectors(model, pooled(tmp_path, PoolingPlan(rows)))


def test_whole_model_whose_tensors_have_bare_names_is_read(tmp_path: Path) -> None:
    # As embedding models are published whose configuration is that of the model they were made of.
    model = models_saved(tmp_path, "Qwen3", "Model", tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    assert_vectors(model, pooled(tmp_path, PoolingPlan("last")))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_one_class_gives_the_logit_of_transformers(tmp_path: Path, family: str) -> None:
    model = models_saved(tmp_path, family, "ForSequenceClassification", num_labels=1)
    for sequence in pooled(tmp_path, PoolingPlan("last", "classes")):
        assert_logits(model, sequence)


def test_architecture_of_no_family_is_told_where_those_stand_that_are_served(tmp_path: Path) -> None:
    models_saved(tmp_path, "Llama", "ForTokenClassification")
    with pytest.raises(CheckpointError, match=r"'LlamaForTokenClassification'.*ops/docs/models.md"):
        read_model_config(tmp_path)
