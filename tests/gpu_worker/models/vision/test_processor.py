"""How images become what towers read: sizes as `transformers` chooses them, pixels as the filter is defined."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from gpu_worker.models.vision.families.internvl import TilesForm
from gpu_worker.models.vision.families.mistral3 import RowsForm
from gpu_worker.models.vision.families.qwen_vl import DynamicForm
from gpu_worker.models.vision.pixels import resize
from gpu_worker.models.vision.processor import Costs, MediaProcessor
from shared.errors import BadRequestError
from tests.gpu_worker.models.vision.seeing_models import random_image

QWEN = DynamicForm(placeholder=7, patch_size=14, merge=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
TILES = TilesForm(7, 8, 9, 448, 256, 1025, 1, 12)
ROWS = RowsForm(7, 8, 9, 28, 2, 1540)


def processor(form: DynamicForm | TilesForm | RowsForm = QWEN) -> MediaProcessor:
    return MediaProcessor(form, Costs(1000, 100_000), b"fingerprint")


def random_sizes(count: int) -> list[tuple[int, int]]:
    rng = random.Random(5)
    return [(rng.randint(1, 5000), rng.randint(30, 5000)) for _ in range(count)]


def test_sizes_are_those_of_transformers() -> None:
    for height, width in random_sizes(300):
        if max(height, width) <= 200 * min(height, width):
            rows, columns = QWEN.plan(width, height, "high").patch_grid
            assert (rows * 14, columns * 14) == smart_resize(height, width, 28, QWEN.min_pixels, QWEN.max_pixels)
        columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        assert TILES.plan(width, height, "high").patch_grid == (rows, columns)


def test_pixels_are_those_of_the_antialiased_filter() -> None:
    """The cubic filter (a = -0.5) in float64; both directions round to a level."""
    for (height, width), (rows, columns) in [((40, 31), (17, 50)), ((64, 64), (23, 24)), ((9, 8), (30, 8))]:
        _, pixels = random_image(height, width, height)
        # Rows are 8 bits before columns are filtered.
        expected = filtered(filtered(pixels.astype(float), columns, 1).clip(0, 255), rows, 0).clip(0, 255)
        assert np.abs(resize(pixels, rows, columns, "bicubic") - expected).max() < 2


def filtered(values: np.ndarray, count: int, axis: int) -> np.ndarray:
    size = values.shape[axis]
    scale = max(size / count, 1.0)
    centres = (np.arange(count)[:, None] + 0.5) * size / count
    x = np.abs((np.arange(size) + 0.5 - centres) / scale)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    weights /= weights.sum(1, keepdims=True)
    return np.moveaxis(np.tensordot(weights, values, (1, axis)), 0, axis)


def test_what_is_prepared_is_memory_of_its_own() -> None:
    ref, pixels = random_image(56, 84, 1)
    pixels.flags.writeable = False
    prepared = processor().prepare(ref, pixels)
    assert prepared.values.shape == (1, 56, 84, 3)
    assert not np.shares_memory(prepared.values, pixels)
    ref, pixels = random_image(200, 100, 1)
    pixels.flags.writeable = False
    assert processor().prepare(ref, pixels).values.shape == (1, 196, 112, 3)


@pytest.mark.parametrize("form", [QWEN, TILES, ROWS])
def test_low_detail_takes_fewer_tokens_and_is_another_image(form: DynamicForm | TilesForm | RowsForm) -> None:
    media = processor(form)
    high = replace(random_image(8, 8, 1)[0], width=1500, height=900)
    low = replace(high, detail="low")
    assert media.num_tokens(low) < media.num_tokens(high) / 2
    assert media.digest(low) != media.digest(high) == media.digest(replace(high, detail="high"))
    assert media.digest(high) != MediaProcessor(form, Costs(1, 1), b"another").digest(high)


@pytest.mark.parametrize("form", [QWEN, TILES, ROWS])
def test_prompts_have_the_tokens_that_are_counted(form: DynamicForm | TilesForm | RowsForm) -> None:
    media = processor(form)
    refs = [replace(random_image(8, 8, n)[0], width=200 + 300 * n, height=333) for n in range(3)]
    expanded, spans = media.expand([1, 7, 2, 7, 7, 3], refs)
    assert len(expanded) == 3 + sum(map(media.num_tokens, refs))
    assert [sum(token == 7 for token in expanded[s.start : s.end]) for s in spans] == [s.num_rows for s in spans]
    assert expanded[-1] == 3


def test_prompts_that_cannot_be_expanded_are_refused() -> None:
    media = processor()
    ref, pixels = random_image(56, 56, 1)
    with pytest.raises(BadRequestError, match="has 2 places for images and 1 images"):
        media.expand([7, 7, 1], [ref])
    with pytest.raises(BadRequestError, match="ends with an image"):
        media.expand([1, 7], [ref])
    with pytest.raises(BadRequestError, match="one side may be 200 times the other"):
        media.num_tokens(replace(ref, width=5000, height=20))
    with pytest.raises(BadRequestError, match=r"^Image 2 of 2: .*one side may be 200 times the other") as e:
        media.expand([7, 7, 1], [ref, replace(ref, width=5000, height=20)])
    assert e.value.param == "media.[1]"
    with pytest.raises(BadRequestError, match="has 56x56 pixels, not 57x56"):
        media.prepare(replace(ref, width=57), pixels)


def test_a_quantized_or_broken_tower_leaves_the_text_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import json

    import torch
    from safetensors.torch import load_file, save_file

    from gpu_worker.models.vision.registry import read_vision
    from tests.gpu_worker.models.vision.seeing_models import SEEING_CASES, save_seeing

    save_seeing(SEEING_CASES["qwen3-vl"], tmp_path)
    assert read_vision(tmp_path) is not None
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("attn.qkv.weight"))
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path)
    assert read_vision(tmp_path) is None
    assert "quantized" in caplog.text
    save_file({name: tensor for name, tensor in tensors.items() if "visual" not in name}, path)
    assert read_vision(tmp_path) is None
    save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_position_embeddings"] = 35
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vision(tmp_path) is None
    assert "must be the square of a whole number" in caplog.text
