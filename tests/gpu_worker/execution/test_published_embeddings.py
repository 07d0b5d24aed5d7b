"""EmbeddingGemma in the layout in which it is published: vectors as `transformers` and the modules behind it give them.

Source: the files of google/embeddinggemma-300m at Hugging Face's hub, with small sizes and random weights.
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

from gpu_worker.consumer.pooled_answers import PooledAnswers
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.model_tasks import EmbeddingForm, read_model_tasks
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.pooling import Pooling
from tests.gpu_worker.execution.engine_run import make_runner, random_prompt, run
from tests.gpu_worker.execution.pooled_sequences import sequence_of
from tests.gpu_worker.execution.test_rotary_encoders import saved

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
