"""How images become what towers read: sizes as `transformers` chooses them, pixels as the filter is defined."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from gpu_worker.models.vision.families.qwen_vl import _Parts2_5
from gpu_worker.models.vision.forms import CutForm, DynamicForm, PooledForm, RowsForm, TilesForm, resize
from gpu_worker.models.vision.processor import ImageForm, MediaProcessor
from gpu_worker.models.vision.registry import read_processor, read_vision
from shared.errors import BadRequestError
from tests.gpu_worker.models.vision.seeing_models import SEEING_CASES, image_processor_class, random_image, save_seeing

QWEN = DynamicForm(7, 14, 2, 56 * 56, 28 * 28 * 1280)
TILES = TilesForm(7, 448, 256, 1025, 8, 9, 1, 12)
ROWS = RowsForm(7, 14, 2, 8, 9, 1540)
PLACES = tuple(tuple(range(100 + 10 * row, 104 + 10 * row)) for row in range(4))
CUT = CutForm(7, 64, 16, 256, 8, 9, PLACES, (10,), (11,), 4 * 64)
POOLED = PooledForm(7, 16, 3, 8, 9, 280)
FORMS = (QWEN, TILES, ROWS, CUT, POOLED)


def processor(form: ImageForm = QWEN) -> MediaProcessor:
    return MediaProcessor(form, b"fingerprint")


def random_sizes(count: int) -> list[tuple[int, int]]:
    rng = random.Random(5)
    return [(rng.randint(1, 5000), rng.randint(30, 5000)) for _ in range(count)]


def test_sizes_are_those_of_transformers() -> None:
    # The last ones have fewer pixels than the least.
    for height, width in [*random_sizes(300), (30, 31), (20, 90), (70, 33)]:
        if max(height, width) <= 200 * min(height, width):
            rows, columns = QWEN.plan(width, height, "high").patch_grid
            assert (rows * 14, columns * 14) == smart_resize(height, width, 28, QWEN.min_pixels, QWEN.max_pixels)
        columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        assert TILES.plan(width, height, "high").patch_grid == (rows, columns)
        rows, columns = POOLED.plan(width, height, "high").patch_grid
        assert (rows * 16, columns * 16) == get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)


@pytest.mark.parametrize("is_cut", [True, False])
def test_images_of_internvl_are_cut_whatever_the_file_says(is_cut: bool, tmp_path: Path) -> None:
    save_seeing(SEEING_CASES["internvl"], tmp_path)
    _set(tmp_path / "preprocessor_config.json", crop_to_patches=is_cut)
    oracle = image_processor_class("internvl").from_pretrained(tmp_path)
    read = read_processor(tmp_path)
    assert read is not None
    for seed, size in enumerate([(16, 16), (33, 51), (90, 20), (64, 64)]):
        ref, pixels = random_image(*size, seed)
        options = {**InternVLProcessor.images_kwargs, "do_rescale": False, "do_normalize": False}
        expected = np.stack(oracle(Image.fromarray(pixels), **options)["pixel_values"]).transpose(0, 2, 3, 1)
        found = read.prepare(ref, pixels).values
        assert found.shape == expected.shape
        # Pillow rounds rows to levels before it filters columns; PyTorch, as torchvision, does not.
        assert np.abs(found.astype(int) - expected).mean() < 0.6


@pytest.mark.parametrize("size", [(33, 200), (200, 33), (64, 64), (5, 400), (255, 256), (300, 299), (97, 64)])
def test_tiles_and_prompts_are_those_of_smolvlm(size: tuple[int, int]) -> None:
    edges = {"longest_edge": 4 * 64}, {"longest_edge": 64}
    oracle = SmolVLMImageProcessorPil(size=edges[0], max_image_size=edges[1], return_row_col_info=True)
    ref, pixels = random_image(*size, 3)
    expected = oracle(Image.fromarray(pixels), do_rescale=False, do_normalize=False)
    (rows,), (columns,) = expected["rows"][0], expected["cols"][0]
    prepared = processor(CUT).prepare(ref, pixels)
    assert prepared.patch_grid == (rows, columns)
    np.testing.assert_array_equal(prepared.values, expected["pixel_values"][0].transpose(0, 2, 3, 1))
    texts = {7: "I", 8: "F", 9: "G", 10: "\n", 11: "\n\n"}
    texts |= {token: f"<row_{r}_col_{c}>" for r, row in enumerate(PLACES, 1) for c, token in enumerate(row, 1)}
    prompt = "".join(texts[token] for token in CUT.plan(size[1], size[0], "high").token_ids)
    assert prompt == get_image_prompt_string(rows, columns, 16, "F", "I", "G")


@pytest.mark.parametrize("corpus", ["a\n\nb \n\n\nc", "a b"])
def test_prompts_are_those_of_idefics3(corpus: str, tmp_path: Path) -> None:
    """Its tokenizers have a token of two line ends, or not."""
    save_seeing(SEEING_CASES["smolvlm"], tmp_path)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel.alphabet()
    tokenizer.train_from_iterator([corpus] * 9, BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    names = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *places]
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(tokenizer.encode("\n\n").ids) == 1 + ("\n" not in corpus)
    image_token_id = tokenizer.token_to_id("<image>")
    _set(tmp_path / "config.json", architectures=["Idefics3ForConditionalGeneration"], image_token_id=image_token_id)
    media = read_processor(tmp_path)
    assert media is not None
    file = json.loads((tmp_path / "preprocessor_config.json").read_text())
    images = SmolVLMImageProcessorPil(size=file["size"], max_image_size=file["max_image_size"])
    count = media.num_tokens(replace(random_image(8, 8, 1)[0], detail="low")) - 3
    library = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.to_str()))
    oracle = Idefics3Processor(images, library, image_seq_len=count)
    for text in ("User:<image>\n\nWhat<end_of_utterance>", "a\n\n<image><image>b", "<image>\nx\n<image>\n\n"):
        shown = [random_image(24, 30 + 10 * number, number) for number in range(text.count("<image>"))]
        expected = oracle(text=text, images=[[Image.fromarray(pixels) for _, pixels in shown]])["input_ids"][0]
        assert media.expand(tokenizer.encode(text).ids, [ref for ref, _ in shown])[0] == expected


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


@pytest.mark.parametrize("form", FORMS)
def test_low_detail_takes_fewer_tokens_and_is_another_image(form: ImageForm) -> None:
    media = processor(form)
    high = replace(random_image(8, 8, 1)[0], width=1500, height=900)
    low = replace(high, detail="low")
    assert media.num_tokens(low) < media.num_tokens(high) / 2
    assert media.digest(low) != media.digest(high) == media.digest(replace(high, detail="high"))
    assert media.digest(high) != MediaProcessor(form, b"another").digest(high)


@pytest.mark.parametrize("form", FORMS)
def test_prompts_have_the_tokens_that_are_counted(form: ImageForm) -> None:
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


def _set(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_bounds_of_pixels_have_older_names(tmp_path: Path) -> None:
    save_seeing(SEEING_CASES["qwen3-vl"], tmp_path)
    path = tmp_path / "preprocessor_config.json"
    _set(path, min_pixels=100, max_pixels=3000)
    vision, size = read_vision(tmp_path), image_processor_class("qwen3_vl").from_pretrained(tmp_path).size
    assert vision is not None
    assert isinstance(vision.form, DynamicForm)
    assert (vision.form.min_pixels, vision.form.max_pixels) == (size["shortest_edge"], size["longest_edge"])


@pytest.mark.parametrize("nested", [{"size": {"shortest_edge": 100, "longest_edge": 3000}}, None])
@pytest.mark.parametrize("has_older_file", [True, False])
def test_nested_fields_of_a_processor_come_before_the_older_file(
    nested: dict[str, object] | None, has_older_file: bool, tmp_path: Path
) -> None:
    save_seeing(SEEING_CASES["qwen3-vl"], tmp_path)
    if not has_older_file:
        (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    oracle = image_processor_class("qwen3_vl")
    size = (oracle.from_pretrained(tmp_path) if has_older_file or nested else oracle()).size
    vision = read_vision(tmp_path)
    assert vision is not None
    assert isinstance(vision.form, DynamicForm)
    assert (vision.form.min_pixels, vision.form.max_pixels) == (size["shortest_edge"], size["longest_edge"])


def test_a_quantized_or_broken_tower_leaves_the_text_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_layers_of_qwen_with_full_attention_have_a_default(tmp_path: Path) -> None:
    save_seeing(SEEING_CASES["qwen2.5-vl"], tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["vision_config"]["fullatt_block_indexes"]
    path.write_text(json.dumps(config))
    expected = AutoConfig.from_pretrained(tmp_path).vision_config.fullatt_block_indexes
    vision = read_vision(tmp_path)
    assert vision is not None
    assert isinstance(vision.parts, _Parts2_5)
    assert vision.parts.whole == frozenset(expected)


@pytest.mark.parametrize(
    ("name", "value"), [("resample", 0), ("do_resize", False), ("image_std", [0.0] * 3), ("image_mean", [-0.5] * 3)]
)
def test_processor_that_is_not_served_leaves_the_text_part(
    name: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_seeing(SEEING_CASES["gemma3"], tmp_path)
    assert read_vision(tmp_path) is not None
    _set(tmp_path / "preprocessor_config.json", **{name: value})
    assert read_vision(tmp_path) is None
    assert f"field '{name}' is" in caplog.text
