"""Models that see answer as `transformers` does, however prompts are cut, cached, preempted or resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.adapters.config import AdapterError
from gpu_worker.adapters.reader import read_adapter
from gpu_worker.core.media import SharedImages
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import DraftPolicy, Speculation
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.execution.ranks.runner import GroupRunner
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.adapters import AdapterTargets
from gpu_worker.models.vision.processor import MediaProcessor
from gpu_worker.models.vision.registry import load_tower, media_config, read_processor, read_vision
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.adapters.peft_files import linear_sizes, write_adapter
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer
from tests.gpu_worker.execution.engine_run import Outcome
from tests.gpu_worker.models.vision.seeing_models import (
    SEEING_CASES,
    Pixels,
    Ref,
    SeeingCase,
    oracle_logits,
    random_image,
    save_seeing,
)


def _build_alone(config: RunnerConfig, images: SharedImages) -> TorchModelRunner:
    return build_runner(config, images=images)


class SeeingRun:
    """A model, and an engine whose prefix cache stays from one `run` to the next."""

    def __init__(
        self,
        directory: Path,
        *,
        block_size: int = 4,
        num_blocks: int = 300,
        build: Callable[[RunnerConfig, SharedImages], TorchModelRunner | GroupRunner] = _build_alone,
        **settings: Any,
    ) -> None:
        self.directory = directory
        processor = read_processor(directory)
        assert processor is not None
        self.processor: MediaProcessor = processor
        self.images = SharedImages()
        settings = {"dtype": "float32", "max_num_seqs": 12, "max_model_len": 512, "max_draft_tokens": 3, **settings}
        config = RunnerConfig(
            directory, block_size=block_size, num_blocks=num_blocks, num_threads=1, takes_images=True, **settings
        )
        self.serving = build(config, self.images)
        self.runner = self.serving.own if isinstance(self.serving, GroupRunner) else self.serving
        vision = read_vision(directory)
        assert vision is not None
        self._vision = vision
        self._whole = vision.max_rows if vision.form.is_bidirectional else 0
        self.restart(self.least_budget + 64)

    @property
    def least_budget(self) -> int:
        """Tokens of a step at least."""
        return 2 + self._whole

    def restart(
        self,
        token_budget: int = 64,
        *,
        num_blocks: int | None = None,
        max_rows: int = 1000,
        policy: DraftPolicy | None = None,
        **settings: Any,
    ) -> None:
        """Begin with an empty cache."""
        self.runner.clear()
        state: StateConfig | None = None
        if self.runner.model_config.has_states:
            state = state_config(self.runner.num_state_slots, self.runner.block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=self.runner.block_size,
                num_blocks=num_blocks or self.runner.num_blocks,
                windows=self.runner.windows,
                max_num_seqs=min(12, token_budget - self._whole),
                max_num_batched_tokens=token_budget,
                max_model_len=self.runner.max_model_len,
                media=replace(media_config(self._vision, self.runner.model_config), max_rows=max_rows),
                state=state,
                **settings,
            ),
            None if policy is None else Speculation(policy),
            images=self.images,
        )
        self.engine = Engine(self.scheduler, self.serving)

    def sequence(
        self,
        name: str,
        token_ids: list[int],
        images: list[tuple[Ref, Pixels]],
        max_tokens: int = 4,
        emitted: tuple[int, ...] = (),
        **sampling: Any,
    ) -> Sequence:
        """Return the sequence of a prompt with a placeholder for each image."""
        refs = [ref for ref, _ in images]
        expanded, spans = self.processor.expand(token_ids, refs)
        chosen = Sampling(temperature=0.0, max_tokens=max_tokens, **sampling)
        sequence = Sequence(name, [*expanded, *emitted], len(expanded), chosen, max_tokens=max_tokens)
        sequence.media = tuple(spans)
        sequence.images = tuple(self.processor.prepare(ref, pixels) for ref, pixels in images)
        return sequence

    def run(self, sequences: list[Sequence], arrivals_per_step: int = 1000) -> Outcome:
        """Generate until every sequence has finished."""
        outcome, coming = Outcome(), list(sequences)
        while coming or self.engine.has_work():
            for sequence in coming[:arrivals_per_step]:
                self.engine.add(sequence)
            del coming[:arrivals_per_step]
            for event in self.engine.step():
                outcome.add(event)
            if self.engine.last_error is not None:
                raise self.engine.last_error
        self.scheduler.check_integrity()
        outcome.num_preemptions = self.scheduler.stats.num_preemptions
        outcome.num_prefix_hits = self.scheduler.stats.num_prefix_hits
        return outcome


def tower_pixels(sequence: Sequence) -> list[Pixels]:
    """Return the images of a sequence as the tower reads them."""
    return [tile for image in sequence.images for tile in image.values]


TOLERANCE = 1e-3


class Seeing:
    """A model, its engine, and its oracle."""

    def __init__(self, case: str | SeeingCase, directory: Path, **settings: Any) -> None:
        self.case = SEEING_CASES[case] if isinstance(case, str) else case
        self.model = save_seeing(self.case, directory)
        self.run = SeeingRun(directory, **settings)

    def prompt(self, num_images: int, seed: int = 0, num_before: int = 5) -> list[int]:
        rng = random.Random(seed)
        token_ids = [rng.randrange(80) for _ in range(num_before)]
        for _ in range(num_images):
            token_ids += [*self.case.placeholder, *(rng.randrange(80) for _ in range(3))]
        return token_ids

    def check(self, sequence: Sequence, outcome: Outcome) -> None:
        """Compare the log probabilities that an outcome reports, of the last tokens or all, with the oracle's."""
        tokens = sequence.token_ids
        expected = oracle_logits(self.case, self.model, tokens, tower_pixels(sequence)).log_softmax(-1)
        reported = [*outcome.prompt_logprobs.get(sequence.id, []), *outcome.logprobs[sequence.id]]
        assert reported
        for entry, row in zip(reversed(reported), reversed(expected[:-1]), strict=False):
            for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top):
                assert abs(logprob - row[token_id].item()) < TOLERANCE


@pytest.fixture(scope="module")
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Seeing(request.param, tmp_path_factory.mktemp(request.param))
    torch.set_num_threads(threads)


each_family = pytest.mark.parametrize("seeing", SEEING_CASES, indirect=True)


@each_family
@pytest.mark.parametrize("sizes", [[(32, 24)], [(24, 32), (16, 40)], [(33, 51), (9, 8), (64, 64)]])
def test_logits_are_those_of_transformers(seeing: Seeing, sizes: list[tuple[int, int]]) -> None:
    images = [random_image(*size, seed) for seed, size in enumerate(sizes)]
    seeing.run.restart(400)
    sequence = seeing.run.sequence("a", seeing.prompt(len(images)), images, prompt_logprobs=20, logprobs=20)
    outcome = seeing.run.run([sequence])
    assert len(outcome.prompt_logprobs["a"]) == sequence.num_prompt_tokens - 1
    seeing.check(sequence, outcome)


def _odd(name: str, vision: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor], **processor: Any) -> Any:
    """Return a family's case with other fields; `change` makes what its oracle reads of what it usually does."""
    case = SEEING_CASES[name]

    def inputs(token_ids: list[int], images: list[Pixels]) -> dict[str, torch.Tensor]:
        given = case.inputs(token_ids, images)
        if "pixel_values" in given:
            given["pixel_values"] = change(given["pixel_values"])
        return given

    vision, processor = {**case.vision, **vision}, {**case.processor, **processor}
    return replace(case, vision=vision, processor=processor, inputs=inputs)


_SMOLVLM = SEEING_CASES["smolvlm"]
_HUNDRED = {"image_mean": [100.0] * 3, "image_std": [100.0] * 3}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# The oracle of InternVL takes off 0.5 and divides by 0.25, that of Gemma 4 does neither.
_ODD = {
    "norm": _odd("internvl", {"norm_type": "rms_norm", "layer_norm_eps": 0.5}, lambda x: x),
    "plain": _odd("internvl", {}, lambda x: x * 0.25 + 0.5, do_normalize=False),
    "rescaled": _odd("internvl", {}, lambda x: (2 * (x * 0.25 + 0.5) - 0.5) / 0.25, rescale_factor=2 / 255),
    "levels": _odd("internvl", {}, lambda x: (255 * (x * 0.25 + 0.5) - 100) / 100, do_rescale=False, **_HUNDRED),
    # Six patches a side of 20 pixels, of which two are in none.
    "smolvlm": replace(
        _SMOLVLM,
        vision={**_SMOLVLM.vision, "image_size": 20, "patch_size": 3},
        whole={"scale_factor": 3},
        processor={**_SMOLVLM.processor, "size": {"longest_edge": 40}, "max_image_size": {"longest_edge": 20}},
    ),
    "gemma4": _odd("gemma4", {}, lambda x: (2 * x - 0.5) / 0.5, do_normalize=True, rescale_factor=2 / 255, **_HALF),
}


@pytest.mark.parametrize("name", _ODD)
def test_options_of_norms_and_processors_are_honoured(name: str, tmp_path: Path) -> None:
    seeing = Seeing(_ODD[name], tmp_path)
    sequence = seeing.run.sequence("a", seeing.prompt(1), [random_image(24, 32, 1)], prompt_logprobs=20, logprobs=20)
    seeing.check(sequence, seeing.run.run([sequence]))


@each_family
def test_an_image_may_be_encoded_piece_by_piece(seeing: Seeing) -> None:
    """Embeddings differ by 1e-6 of the largest: products of few rows are added up in another order."""
    directory, (ref, pixels) = seeing.run.directory, random_image(33, 51, 4)
    vision = read_vision(directory)
    assert vision is not None
    tower = load_tower(directory, vision, torch.float32, torch.device("cpu"))
    image = seeing.run.processor.prepare(ref, pixels)
    whole = tower.begin(image)
    num_passes, sizes = tower.num_passes(whole), random.Random(7)
    stages = vision.stages(1000)
    assert num_passes == len(stages) * image.num_rows
    # In the second of a layer's three stages patches look at others: at all, where there is no window.
    assert all(stage.row > 0 for stage in stages)
    assert [stage.pair > 0 for stage in stages[:4]] == [False, False, 0 not in vision.windows, False]
    tower.advance(whole, num_passes)
    expected = tower.finish(whole)
    for most in (1, 7, 40):
        encoding = tower.begin(image)
        while encoding.num_passes < num_passes:
            tower.advance(encoding, min(num_passes, encoding.num_passes + sizes.randint(1, most)))
        found = tower.finish(encoding)
        for one, other in zip((found.rows, *found.deep), (expected.rows, *expected.deep), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6 * other.abs().max().item(), rtol=0)


@each_family
def test_a_prompt_may_be_cut_anywhere(seeing: Seeing) -> None:
    images = [random_image(24, 32, 1), random_image(16, 24, 2)]
    prompt = seeing.prompt(2)
    num_tokens = seeing.run.sequence("a", prompt, images).num_prompt_tokens
    least = seeing.run.least_budget
    for budget in range(least, least + num_tokens):
        seeing.run.restart(budget, enable_prefix_caching=False)
        sequence = seeing.run.sequence("a", prompt, images, 2, logprobs=20)
        seeing.check(sequence, seeing.run.run([sequence]))


@each_family
def test_a_hit_may_end_anywhere(seeing: Seeing) -> None:
    """Also inside of an image, whose other tokens are computed then."""
    images = [random_image(24, 32, 1), random_image(16, 24, 2)]
    seeing.run.restart(400)
    first = seeing.run.sequence("first", seeing.prompt(2), images, 2)
    seeing.run.run([first])
    blocks = seeing.run.scheduler._blocks
    num_blocks = (first.num_prompt_tokens - 1) // seeing.run.runner.block_size
    for cut in reversed(range(num_blocks)):
        for digest in first.block_digests[cut:num_blocks]:
            blocks.pool.forget(digest)
        again = seeing.run.sequence("again", seeing.prompt(2), images, 2, logprobs=20)
        seeing.check(again, seeing.run.run([again]))
        if blocks.states is None and not blocks.windows:
            assert again.num_cached_tokens == cut * seeing.run.runner.block_size


@each_family
def test_another_image_is_another_answer(seeing: Seeing) -> None:
    """Same text; then the same images in another order, and one of them twice."""
    a, b = random_image(24, 32, 1), random_image(24, 32, 2)
    seeing.run.restart(400)
    for number, images in enumerate(([a, a], [a, b], [b, a], [b, b], [a, a])):
        sequence = seeing.run.sequence(str(number), seeing.prompt(2), images, 3, logprobs=20)
        seeing.check(sequence, seeing.run.run([sequence]))
    assert sequence.num_cached_tokens >= sequence.num_prompt_tokens - 2 * seeing.run.runner.block_size


@each_family
def test_a_turn_with_one_more_image_reuses_the_prefix(seeing: Seeing) -> None:
    images = [random_image(40, 40, seed) for seed in range(3)]
    seeing.run.restart(400)
    for count in (2, 3):
        sequence = seeing.run.sequence(str(count), seeing.prompt(count), images[:count], 3, logprobs=20)
        num_before = sequence.media[count - 1].start
        seeing.check(sequence, seeing.run.run([sequence]))
    assert sequence.num_cached_tokens > num_before - 2 * seeing.run.runner.block_size


@each_family
def test_answers_survive_preemption_and_a_move(seeing: Seeing) -> None:
    def sequences(**options: Any) -> list[Sequence]:
        return [
            seeing.run.sequence(str(n), seeing.prompt(1, n), [random_image(24, 32, n)], 24, **options) for n in range(4)
        ]

    seeing.run.restart(400)
    expected = seeing.run.run(sequences())
    num_blocks = 3 * sum(-(-s.num_tokens // seeing.run.runner.block_size) + 6 for s in sequences()) // 4
    seeing.run.restart(64, num_blocks=num_blocks, headroom_tokens=1)
    crowded = seeing.run.run(sequences())
    assert crowded.num_preemptions > 0
    assert crowded.tokens == expected.tokens
    seeing.run.restart(64)
    moved = [
        seeing.run.sequence(s.id, seeing.prompt(1, n), [random_image(24, 32, n)], 24, tuple(expected.tokens[s.id][:9]))
        for n, s in enumerate(sequences())
    ]
    outcome = seeing.run.run(moved, arrivals_per_step=1)
    assert {name: expected.tokens[name][:9] + tokens for name, tokens in outcome.tokens.items()} == expected.tokens


@each_family
@pytest.mark.parametrize("kind", [ChainProposer])
def test_answers_are_the_same_with_drafts(seeing: Seeing, kind: type[ChainProposer]) -> None:
    def sequences() -> list[Sequence]:
        return [
            seeing.run.sequence(str(n), seeing.prompt(2, n), [random_image(24, 32, n), random_image(8, 8, n)], 20)
            for n in range(3)
        ]

    seeing.run.restart(400)
    expected = seeing.run.run(sequences()).tokens
    seeing.run.runner.verify_drafts_of(kind(expected, 0.8))
    seeing.run.restart(400, policy=FixedDepth(3))
    assert seeing.run.run(sequences()).tokens == expected
    seeing.run.runner.verify_drafts_of(None)
    assert seeing.run.scheduler.speculation is not None
    assert seeing.run.scheduler.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["mistral3", "internvl"])
def test_tower_of_which_another_layer_is_wanted_is_not_served(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_seeing(replace(SEEING_CASES[name], whole={**SEEING_CASES[name].whole, "vision_feature_layer": -2}), tmp_path)
    assert read_vision(tmp_path) is None
    assert "field 'vision_feature_layer'" in caplog.text


@each_family
def test_adapters_of_a_tower_are_refused(seeing: Seeing, tmp_path: Path) -> None:
    """Layers of some towers have the names of those of the text part."""
    targets = AdapterTargets(4, torch.device("cpu"), torch.float32)
    targets.add(("model.layers.0.self_attn.q_proj",), (24,), 24)
    sizes = linear_sizes(seeing.model, r"(?!lm_head|.*\.(?:language_model|text_model)\.).*")
    assert len(sizes) > 8
    renamed = seeing.run.runner.model_config.block.names.renamed
    for number, (module, size) in enumerate(sizes.items()):
        with pytest.raises(AdapterError, match="is not of the model's text part"):
            read_adapter(write_adapter(tmp_path / str(number), {module: size}), targets, renamed)
