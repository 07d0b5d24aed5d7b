"""Windows that run through one layer after another come to what they come to in the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.registry import read_model_config
from ops.quantize.layer_pass import LayerPass, num_kept, take_token_vectors
from tests.gpu_worker.models.families.dense_cases import CASES
from tests.gpu_worker.models.families.random_models import save_case

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "kept"), [("gemma2", 0), ("gemma4-e", 2 * 2 * 28)])
def test_the_stream_behind_the_last_layer_is_that_of_transformers(tmp_path: Path, name: str, kept: int) -> None:
    oracle = save_case(CASES[name], tmp_path)
    config, windows = read_model_config(tmp_path), torch.randint(3, 97, (3, 21))
    assert num_kept(config) == kept
    names = config.block.names
    with (
        Checkpoint(tmp_path, torch.float32, CPU, renamed=names.renamed, unused=names.unused) as checkpoint,
        torch.inference_mode(),
    ):
        embedding = checkpoint.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        vectors = take_token_vectors(config, checkpoint, windows, embedding, CPU)
        embedded = torch.nn.functional.embedding(windows, embedding) * config.block.embedding_scale
        layer_pass = LayerPass(config, embedded, CPU, vectors)
        source = config.layer_source(checkpoint)
        for index in range(config.num_layers):
            layer_pass.advance(index, config.take_layer(source, index))
        hidden = oracle.model.norm(layer_pass.hidden)
        expected = oracle.model(windows).last_hidden_state
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
