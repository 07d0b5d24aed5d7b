"""Images: preparing beside `transformers` and vLLM, the time to a first token, and text streams beside a flood.

Run as `python -m ops.bench.images`. Preparing counts the processor time of decoding a JPEG in a process of its own, and
of resizing it as Qwen 2.5-VL reads it; the others normalise and cut into patches, too, which here is the model's work.
With `--vllm` vLLM's CPU build prepares the same files in an environment of its own (`peers/image_script.py`), which is
installed the first time and takes 4 GB. Engines serve a small random Qwen 2.5-VL, in one thread. Their times are those
that this thread computes, which other processes lengthen less: steps in which eight streams decode, alone, beside
prompts, beside images, which have as many tokens, and beside the largest images, of which a fresh engine has seen one
smaller one: `of_prompts` and `of_alone` are a step's time as a multiple of one beside prompts or alone, `worst` the
longest. A step of either has the same budget of tokens, so a stream should see 1.1 of a step beside prompts at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Values
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, median

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from gpu_worker.core.media import SharedImages
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.media.decoder import Decoder
from gpu_worker.models.registry import read_model_config
from gpu_worker.models.vision.processor import MediaProcessor
from gpu_worker.models.vision.registry import media_config, read_processor, read_vision
from ops.bench.comparison import add_cache, in_turns, median_ratio
from ops.bench.peers import engines
from ops.bench.peers.engines import run_program, vllm_environ, vllm_python
from ops.bench.record import ResultTable, add_list, bench_parser, positive
from ops.bench.stepping import make_engine
from shared.media import MediaRef

_VOCABULARY, _IMAGE = 512, 500
_SIDE, _IMAGE_TOKENS = 448, 256
_STREAMS, _WAITING, _STEPS = 8, 2, 60
_BUDGET = 256
_PIP = ("-m", "pip", "install", "-q", "--no-deps")
_TORCHVISION = "torchvision==0.28.*"
"""Of the torch that vLLM's CPU build brings."""
ALONE, PROMPTS, IMAGES, LARGEST, COLD = "alone", "prompts", "images", "largest", "largest, cold"
_LARGEST_SIDE = 3584
"""Of 65,536 patches, the most that the model reads."""


def save_model(directory: Path) -> None:
    """Write a random model that reads images as Qwen 2.5-VL does."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]

    text = {"vocab_size": _VOCABULARY, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    tower = {"depth": 4, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "out_hidden_size": 256}
    tokens = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={**text, **heads, **tokens, "rope_parameters": rope},
        vision_config={**tower, "fullatt_block_indexes": [1, 3]},
        image_token_id=_IMAGE,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12_845_056}))


def photo(width: int, height: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return pixels that compress about as those of a photo do."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return (smooth + generator.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8)


def _noise(side: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def _reference(data: bytes, width: int, height: int) -> MediaRef:
    digest = hashlib.sha256(data).digest()
    return MediaRef(digest=digest, num_bytes=len(data), width=width, height=height, mime="image/jpeg")


def jpeg(width: int, height: int, seed: int) -> tuple[bytes, MediaRef]:
    """Return a photo as cameras store it."""
    target = io.BytesIO()
    Image.fromarray(photo(width, height, seed)).save(target, "JPEG", quality=90)
    return target.getvalue(), _reference(target.getvalue(), width, height)


def _cpu_s() -> float:
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


async def _prepare(files: Values[tuple[bytes, MediaRef]], processor: MediaProcessor) -> float:
    """Return the processor time of decoding and preparing files, that of the process that decodes included."""
    began, decoder = _cpu_s(), Decoder()
    for data, ref in files:
        processor.prepare(ref, await decoder.decode(ref, data))
    await decoder.close()
    return _cpu_s() - began


def _vllm_rate(home: Path, directory: Path, files: Values[tuple[bytes, MediaRef]]) -> float:
    """Return how many of these files vLLM prepares in a second of a core."""
    python, torchvision = vllm_python(home), home / "torchvision"
    if not torchvision.exists():
        run_program([str(python), *_PIP, "--target", str(torchvision), _TORCHVISION], 600)
    paths = [directory / f"{number}.jpg" for number in range(len(files))]
    for path, (data, _) in zip(paths, files, strict=True):
        path.write_bytes(data)
    script = Path(engines.__file__).parent / "image_script.py"
    command = [python, script, torchvision, directory, *paths]
    return float(run_program([*map(str, command)], 900, vllm_environ(1)).split()[-1])


def measure_preparing(directory: Path, sizes: Values[tuple[int, int]], num_files: int, vllm_home: Path | None) -> None:
    """Print how many images a core prepares in a second, and how many `transformers` and vLLM do."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    table = ResultTable("images")
    processor, theirs = read_processor(directory), Qwen2VLImageProcessorPil.from_pretrained(directory)
    assert processor is not None
    for width, height in sizes:
        files = [jpeg(width, height, seed) for seed in range(num_files)]
        # The first one pays for the start of the process.
        first = asyncio.run(_prepare(files[:1], processor))
        own = max(1e-6, asyncio.run(_prepare([files[0], *files], processor)) - first)
        began = _cpu_s()
        for data, _ in files:
            theirs(images=Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="pt")
        other = _cpu_s() - began
        row: dict[str, object] = {
            "pixels": f"{width}x{height}",
            "per_core_s": round(num_files / own, 2),
            "transformers_per_core_s": round(num_files / other, 2),
            "ratio": round(other / own, 2),
        }
        if vllm_home is not None:
            rate = _vllm_rate(vllm_home, directory, files)
            row |= {"vllm_per_core_s": round(rate, 2), "of_vllm": round(num_files / own / rate, 2)}
        table.add(row)


class Bench:
    """Owns an engine that sees, and what it is asked."""

    def __init__(self, directory: Path) -> None:
        vision, processor = read_vision(directory), read_processor(directory)
        assert vision is not None
        assert processor is not None
        self._processor, images, self._seeds = processor, SharedImages(), count()
        config = RunnerConfig(
            directory,
            dtype="float32",
            num_blocks=3000,
            max_num_seqs=_STREAMS + _WAITING,
            max_num_batched_tokens=_BUDGET,
            max_model_len=20_000,
            num_threads=1,
            takes_images=True,
        )
        media = media_config(vision, read_model_config(directory))
        self.engine = make_engine(config, images=images, media=media)

    def prompt(self) -> Sequence:
        """Queue a text as long as one with an image."""
        return self.engine.add(_text(_IMAGE_TOKENS + 16), 1)

    def shown(self, num_images: int, side: int = _SIDE) -> Sequence:
        """Queue a prompt with images that are not cached."""
        pixels = [_noise(side, next(self._seeds)) for _ in range(num_images)]
        refs = [_reference(each.tobytes(), side, side) for each in pixels]
        token_ids, spans = self._processor.expand([*_text(8), *([_IMAGE] * num_images), *_text(8)], refs)
        sequence = self.engine.sequence(token_ids, 1)
        sequence.media = tuple(spans)
        sequence.images = tuple(self._processor.prepare(*each) for each in zip(refs, pixels, strict=True))
        self.engine.engine.add(sequence)
        return sequence

    def first_token_s(self, num_images: int) -> float:
        """Return the seconds that images and their prompt are computed until the first token."""
        sequence = self.shown(num_images)
        began = time.thread_time()
        self.engine.prefill([sequence])
        taken = time.thread_time() - began
        self.engine.run()
        return taken

    def steps_s(self, flood: Callable[[], Sequence] | None) -> list[float]:
        """Return the seconds that steps with all streams compute, while some of a flood always wait."""
        streams = [self.engine.add(_text(8), 2000) for _ in range(_STREAMS)]
        self.engine.prefill(streams)
        waiting: list[Sequence] = []
        seconds = []
        for _ in range(_STEPS):
            waiting = [sequence for sequence in waiting if not sequence.num_output_tokens]
            while flood is not None and len(waiting) < _WAITING:
                waiting.append(flood())
            began = time.thread_time()
            self.engine.step()
            seconds.append(time.thread_time() - began)
        self.engine.abort([*streams, *(sequence for sequence in waiting if not sequence.num_output_tokens)])
        return seconds


def _text(length: int) -> list[int]:
    return random.choices(range(_IMAGE), k=length)


def measure_streams(directory: Path, rounds: int, table: ResultTable) -> None:
    """Print the time of a step of streams, alone and beside floods that have their turns."""
    bench = Bench(directory)

    def cold_steps_s() -> list[float]:
        cold = Bench(directory)
        cold.first_token_s(1)
        return cold.steps_s(lambda: cold.shown(1, _LARGEST_SIDE))

    runs: dict[str, Callable[[], list[float]]] = {
        ALONE: partial(bench.steps_s, None),
        PROMPTS: partial(bench.steps_s, bench.prompt),
        IMAGES: partial(bench.steps_s, lambda: bench.shown(1)),
        LARGEST: partial(bench.steps_s, lambda: bench.shown(1, _LARGEST_SIDE)),
        COLD: cold_steps_s,
    }
    taken = in_turns(runs, rounds)
    means = {kind: list(map(mean, each)) for kind, each in taken.items()}
    longest = {kind: list(map(max, each)) for kind, each in taken.items()}
    for kind in runs:
        table.add(
            {
                "beside": kind,
                "step_ms": round(median(means[kind]) * 1e3, 2),
                "worst_ms": round(median(longest[kind]) * 1e3, 2),
                "of_prompts": median_ratio(means[kind], means[PROMPTS]),
                "of_alone": median_ratio(means[kind], means[ALONE]),
                "worst_of_prompts": median_ratio(longest[kind], longest[PROMPTS]),
            }
        )


def main(arguments: Values[str] | None = None) -> None:
    """Print three tables, and append their rows to the results."""
    parser = bench_parser("images", __doc__)
    add_list(parser, "--images", positive, [1, 4, 16], "images of a prompt: 1,4,16")
    add_list(parser, "--megapixels", positive, [1, 12], "of the photos that are prepared: 1,12")
    parser.add_argument("--files", type=positive, default=8, help="photos of each size")
    parser.add_argument("--rounds", type=positive, default=5, help="in which each kind has its turn")
    parser.add_argument("--vllm", action="store_true", help="prepare the same photos by vLLM, too")
    add_cache(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_model(directory)
        sides = [
            (round((each * 1e6 * 4 / 3) ** 0.5), round((each * 1e6 * 3 / 4) ** 0.5)) for each in options.megapixels
        ]
        measure_preparing(directory, sides, options.files, options.cache / "vllm" if options.vllm else None)
        bench, table = Bench(directory), ResultTable("images")
        for num_images in options.images:
            taken = median(bench.first_token_s(num_images) for _ in range(options.rounds))
            table.add(
                {"images": num_images, "tokens": num_images * _IMAGE_TOKENS, "first_token_ms": round(taken * 1e3)}
            )
        measure_streams(directory, options.rounds, ResultTable("images"))


if __name__ == "__main__":
    main()
