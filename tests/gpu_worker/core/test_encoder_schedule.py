"""Images pass their towers beside decodes, within the step's budget, and are kept as long as they are needed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.encoder_schedule import MOST_BEGUN
from gpu_worker.core.media import MediaSpan
from gpu_worker.core.plan import EncodeWork, StepPlan
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import MediaConfig, SchedulerConfig, StageCost
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.step import SampledTokens, ScheduledStep, StepResult
from shared.errors import BadRequestError
from shared.messages import Lane
from shared.sampling import Sampling

STAGES = 6
# What a patch of an image costs for each embedding: an image's cost in a stage is its rows times its patches.
PAIRS = (StageCost(0.0, 1.0),) * STAGES
HALVES = (StageCost(0.0, 0.5),) * STAGES


def make_scheduler(
    budget: int = 32,
    max_rows: int = 40,
    bidirectional_tokens: int = 0,
    stages: tuple[StageCost, ...] = PAIRS,
    max_num_tokens: int = 400,
) -> Scheduler:
    media = MediaConfig(stages, max_rows, bidirectional_tokens)
    num_blocks = max(200, max_num_tokens)
    config = SchedulerConfig(4, num_blocks, 8, budget, max_num_tokens, media=media, enable_prefix_caching=False)
    return Scheduler(config)


def text(name: str, length: int = 4, max_tokens: int = 200) -> Sequence:
    return Sequence(name, [1] * length, length, Sampling(max_tokens=max_tokens), max_tokens=max_tokens)


def seeing(
    name: str, *images: tuple[str, int], cost: int = 1, is_bidirectional: bool = False, max_tokens: int = 2
) -> Sequence:
    """Return a sequence whose images, by name and length, stand between texts of 3 tokens.

    In each stage, each of an image's embeddings costs `cost` tokens.
    """
    sequence = text(name, 3, max_tokens)
    spans = []
    for image, length in images:
        start = len(sequence.token_ids)
        spans.append(MediaSpan(start, length, image.encode() * 32, length, (), cost, is_bidirectional))
        sequence.token_ids += [9] * length + [1] * 3
    sequence.num_prompt_tokens = len(sequence.token_ids)
    sequence.media = tuple(spans)
    return sequence


class Runner:
    """Steps a scheduler, and checks what a runner would need."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.passed: dict[bytes, int] = {}
        self.plans: list[StepPlan] = []
        self.images: dict[bytes, MediaSpan] = {}

    @property
    def begun(self) -> list[bytes]:
        """Images that have passed a part of the tower."""
        num_stages = len(self.scheduler.config.media.stages)
        return [digest for digest, end in self.passed.items() if 0 < end < num_stages * self.images[digest].num_rows]

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule(0.0)
        assert step is not None
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(step.plan), type=StepPlan)
        self.plans.append(plan)
        for digest in plan.forgotten:
            self.passed.pop(digest, None)
        for sequence in self.scheduler.sequences:
            self.images |= {span.digest: span for span in sequence.media}
        for work in plan.encodes:
            assert work.first in (0, self.passed.get(work.digest, 0))
            self.passed[work.digest] = work.end
            # In the runner's order: images that have passed all leave the tower before others enter it.
            assert len(self.begun) <= MOST_BEGUN
        for item in step.scheduled:
            for span in item.sequence.media:
                if item.start < span.end and span.start < item.start + item.num_tokens:
                    num_passes = len(self.scheduler.config.media.stages) * span.num_rows
                    assert self.passed[span.digest] == num_passes, "an image is not encoded"
                    assert (
                        not span.is_bidirectional or item.start <= span.start < span.end <= item.start + item.num_tokens
                    )
        if not step.is_empty:
            sampled = [SampledTokens((5,)) if item.samples else SampledTokens() for item in step.scheduled]
            self.scheduler.settle(step, StepResult(step.step, sampled))
        return step

    def finish(self, most: int = 200) -> None:
        for _ in range(most):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("sequences starve")

    def cost(self, plan: StepPlan) -> float:
        """Return what the images of a plan cost."""
        assert self.scheduler.config.media is not None
        cost = 0.0
        for work in plan.encodes:
            span = self.images[work.digest]
            for number, stage in enumerate(self.scheduler.config.media.stages):
                first, end = (
                    min(max(each - number * span.num_rows, 0), span.num_rows) for each in (work.first, work.end)
                )
                num_rows = end - first + (stage.fixed_rows if end > first else 0)
                cost += num_rows * (stage.row + stage.pair * span.num_patches)
        return cost


def encoded(plan: StepPlan) -> int:
    return sum(work.end - work.first for work in plan.encodes)


def test_alone_an_image_takes_steps_of_its_own_within_the_budget() -> None:
    """A request that comes meanwhile waits for one of them, as for a step of a long prompt."""
    scheduler = make_scheduler(budget=32)
    runner = Runner(scheduler)
    sequence = seeing("a", ("x", 8), cost=3)
    scheduler.add(sequence)
    while not sequence.num_output_tokens:
        step = runner.step()
        assert step.num_tokens + runner.cost(step.plan) <= 32
    assert [encoded(plan) for plan in runner.plans[:5]] == [10, 10, 10, 10, 8]
    assert [plan.num_tokens for plan in runner.plans[:5]] == [2, 1, 0, 0, 8]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_step_with_images_costs_no_more_than_its_budget(data: st.DataObject) -> None:
    """Whatever the budget, the tower and the image, as long as one embedding costs no more than decodes leave of it."""
    budget = data.draw(st.integers(8, 300), "budget")
    each_stage = st.builds(StageCost, st.floats(0.0, 2.0), st.floats(0.0, 0.002), st.integers(0, 1))
    stages = data.draw(st.lists(each_stage, min_size=1, max_size=4), "stages")
    scheduler = make_scheduler(budget, 400, stages=tuple(stages), max_num_tokens=1000)
    runner = Runner(scheduler)
    decodes = data.draw(st.integers(0, 3), "decodes")
    for number in range(decodes):
        scheduler.add(text(f"t{number}", 2, 900))
    for number in range(data.draw(st.integers(1, 3), "sequences")):
        rows, patches = data.draw(st.integers(1, 150), "rows"), data.draw(st.integers(1, 1000), "patches")
        sequence = seeing(f"i{number}", (str(number), rows), cost=patches)
        sequence.lane = data.draw(st.sampled_from(["interactive", "batch"]), "lane")
        scheduler.add(sequence)
    for _ in range(2000):
        if not any(sequence.media for sequence in scheduler.sequences):
            break
        step = runner.step()
        assert step.num_tokens + runner.cost(step.plan) <= budget + 1e-3 or encoded(step.plan) == 1
    assert not any(sequence.media for sequence in scheduler.sequences)


def test_no_step_exceeds_the_budget_for_the_largest_image() -> None:
    """65,536 patches of Qwen 2.5-VL 3B's tower, four to an embedding, beside streams: 2,276 tokens by half a layer."""
    weights, size, inner, budget = 2.77e9, 1280, 3420, 256
    layer = (
        StageCost(4 * 3 * size**2 / weights),
        StageCost(4 * size**2 / weights, 4 * 2 * size / weights, fixed_rows=4),
        StageCost(4 * 3 * size * inner / weights),
    )
    scheduler = make_scheduler(budget, 16_384, stages=layer * 2, max_num_tokens=20_000)
    runner = Runner(scheduler)
    for name in "ab":
        scheduler.add(text(name, max_tokens=15_000))
    runner.step()
    sequence = seeing("i", ("x", 16_384), cost=65_536)
    scheduler.add(sequence)
    while not sequence.num_output_tokens:
        step = runner.step()
        assert step.num_decodes == 2
        assert step.num_tokens + runner.cost(step.plan) <= budget
    assert sum(map(encoded, runner.plans)) == 6 * 16_384


def test_beside_decodes_passes_are_charged_to_the_budget() -> None:
    """A step with decodes takes no more than its budget, and decodes are in each step."""
    scheduler = make_scheduler(budget=32)
    runner = Runner(scheduler)
    for name in "abc":
        scheduler.add(text(name))
    runner.step()
    scheduler.add(seeing("i", ("x", 12)))
    while not scheduler.sequences[-1].num_output_tokens:
        step = runner.step()
        assert step.num_decodes == 3
        assert step.num_tokens + encoded(step.plan) <= 32
        assert step.num_tokens == sum(item.num_tokens for item in step.scheduled)
    assert [encoded(plan) for plan in runner.plans[1:4]] == [29, 29, 14]


def test_an_expensive_image_passes_an_embedding_a_step() -> None:
    scheduler = make_scheduler(budget=32)
    runner = Runner(scheduler)
    scheduler.add(text("a"))
    runner.step()
    scheduler.add(seeing("i", ("x", 12), cost=1000))
    for _ in range(12 * STAGES):
        assert encoded(runner.step().plan) == 1
    runner.finish(300)


def stream_with_images(
    lane: Lane, duration_s: Callable[[ScheduledStep], float], stages: tuple[StageCost, ...] = HALVES
) -> list[float]:
    """Return how long the steps of a stream take beside images of a lane."""
    scheduler, now, seconds = make_scheduler(200, 400, stages=stages), 0.0, list[float]()
    runner = Runner(scheduler)
    scheduler.add(text("stream", max_tokens=350))
    for number in range(340):
        if number >= 40 and not any(sequence.media for sequence in scheduler.sequences):
            sequence = seeing(f"i{number}", (chr(number), 40))
            sequence.lane = lane
            scheduler.add(sequence)
        done = runner.step()
        seconds.append(duration_s(done))
        now += seconds[-1]
        scheduler.observe(done, StepResult(done.step, [SampledTokens() for _ in done.scheduled]), seconds[-1], now)
    assert sum(map(encoded, runner.plans)) >= 40 * STAGES
    return seconds


def test_images_of_batch_work_slow_a_stream_down_by_what_batch_work_may() -> None:
    def duration_s(step: ScheduledStep) -> float:
        return 0.01 + 0.002 * len(step.scheduled) + 0.001 * step.num_tokens + 0.0005 * encoded(step.plan)

    seconds = stream_with_images("batch", duration_s)
    assert mean(seconds[140:]) < 1.1 * mean(seconds[:40])


def test_batch_image_that_waited_for_rows_saved_nothing_meanwhile() -> None:
    """No step beside a stream has more than the one pass that was saved for, of the fewest embeddings."""
    scheduler = make_scheduler(budget=200, stages=HALVES, max_num_tokens=900)
    runner, encoder = Runner(scheduler), scheduler._planner.encoder
    scheduler.add(text("stream", max_tokens=890))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_make_room", lambda *_: False)
        sequence = seeing("i", ("x", 40))
        sequence.lane = "batch"
        scheduler.add(sequence)
        for number in range(150):
            done = runner.step()
            sampled = [SampledTokens() for _ in done.scheduled]
            scheduler.observe(done, StepResult(done.step, sampled), 0.013, 0.013 * (number + 1))
        assert not any(map(encoded, runner.plans))
    for number in range(150, 850):
        done = runner.step()
        sampled = [SampledTokens() for _ in done.scheduled]
        scheduler.observe(done, StepResult(done.step, sampled), 0.013 + 0.0005 * encoded(done.plan), 0.02 * number)
    passes = list(map(encoded, runner.plans))
    assert (sum(passes), max(passes)) == (40 * STAGES, 16)


def test_batch_image_whose_embeddings_cost_more_than_a_step_is_encoded_beside_a_stream() -> None:
    """Steps save for one embedding, or the image would wait for as long as there are streams."""
    scheduler = make_scheduler(budget=32)
    runner = Runner(scheduler)
    scheduler.add(text("stream", max_tokens=390))
    runner.step()
    sequence = seeing("i", ("x", 12), cost=40)
    sequence.lane = "batch"
    scheduler.add(sequence)
    for _ in range(380):
        assert runner.step().num_decodes >= 1
    assert max(map(encoded, runner.plans)) == 1
    assert sequence.num_output_tokens


def test_batch_image_that_one_step_computes_has_its_turn_beside_a_stream() -> None:
    """It has more tokens than a step gives to batch work: they are saved, or it would wait for ever."""
    scheduler, seconds = make_scheduler(200, 400, 40, (StageCost(0.1),), 1300), list[float]()
    runner = Runner(scheduler)
    scheduler.add(text("stream", max_tokens=1200))
    sequence = seeing("i", ("x", 40), is_bidirectional=True, max_tokens=1)
    sequence.lane = "batch"
    for number in range(1000):
        if number == 40:
            scheduler.add(sequence)
        done = runner.step()
        seconds.append(0.1 + 0.002 * len(done.scheduled) + 0.001 * (done.num_tokens + encoded(done.plan)))
        sampled = [SampledTokens() for _ in done.scheduled]
        scheduler.observe(done, StepResult(done.step, sampled), seconds[-1], sum(seconds))
    assert sequence.num_output_tokens
    assert mean(seconds[40:]) < 1.1 * mean(seconds[:40])


def test_a_stage_costs_what_it_takes() -> None:
    """A stage that takes long has steps without other prompts; steps of quick ones are filled."""

    def duration_s(step: ScheduledStep) -> float:
        stages = [number // 40 for work in step.plan.encodes for number in range(work.first, work.end)]
        encoding_s = sum(0.00375 if stage == 3 else 0.00025 for stage in stages)
        return 0.01 + 0.002 * len(step.scheduled) + 0.001 * step.num_tokens + encoding_s

    seconds = stream_with_images("interactive", duration_s, (*HALVES[:3], StageCost(0.001, 0.5), *HALVES[4:]))
    assert max(seconds[200:]) < 1.1 * (0.014 + 0.2)


@pytest.mark.parametrize("slowness", [0.4, 1.0, 3.0])
def test_steps_with_images_come_to_take_as_long_as_others(slowness: float) -> None:
    """However long a layer of the tower takes beside the tokens that have as much to compute."""
    budget, now = 200, 0.0
    scheduler = make_scheduler(budget=budget, max_rows=400)
    runner = Runner(scheduler)
    for name in "abc":
        scheduler.add(text(name, max_tokens=1000))

    def step() -> float:
        nonlocal now
        done = runner.step()
        duration_s = 0.01 + 0.002 * len(done.scheduled) + 0.001 * done.num_tokens
        duration_s += slowness * 0.001 * encoded(done.plan)
        now += duration_s
        scheduler.observe(done, StepResult(done.step, [SampledTokens() for _ in done.scheduled]), duration_s, now)
        return duration_s

    def longest(sequence: Sequence) -> float:
        scheduler.add(sequence)
        taken = []
        while sequence.num_output_tokens < 2:
            taken.append(step())
        return max(taken)

    longest_of_text = max(longest(text(f"t{length}", length)) for length in (10, 60, 120, 390, 30, 90, 350, 380) * 2)
    images = [longest(seeing(f"i{number}", (chr(97 + number), 40))) for number in range(12)]
    assert max(images[-3:]) < 1.1 * longest_of_text
    used = max(sum(map(encoded, runner.plans[-40:][n : n + 1])) for n in range(40))
    assert used >= min(40 * STAGES, int(0.8 * budget / slowness))


@pytest.mark.parametrize("num_slow_steps", [0, 3])
def test_steps_with_the_first_large_image_are_as_long_as_others(num_slow_steps: int) -> None:
    """Its embeddings take longer than those of small ones, and the engine's first steps took longer than later ones."""
    scheduler = make_scheduler(200, 8000, stages=(StageCost(0.1),) * STAGES, max_num_tokens=9000)
    runner, seconds = Runner(scheduler), list[float]()

    def finish(sequence: Sequence) -> float:
        scheduler.add(sequence)
        first = len(seconds)
        while not sequence.num_output_tokens:
            done = runner.step()
            row_s = 0.00004 if sequence.id == "small" else 0.00016
            slowness = 3.0 if len(seconds) < num_slow_steps else 1.0
            rest_s = 0.01 + 0.002 * len(done.scheduled) + 0.001 * done.num_tokens
            seconds.append(slowness * (rest_s + row_s * encoded(done.plan)))
            scheduler.observe(done, StepResult(done.step, [SampledTokens() for _ in done.scheduled]), seconds[-1], 0.0)
        return max(seconds[first:])

    finish(text("stream", 4, 7000))
    for number, length in enumerate((40, 300, 90, 200) if num_slow_steps else (40, 300, 90, 200) * 4):
        finish(text(f"t{number}", length, 1))
    finish(seeing("small", ("s", 40), max_tokens=1))
    assert finish(seeing("large", ("x", 8000), max_tokens=1)) < 1.15 * 0.214
    assert sum(map(encoded, runner.plans)) == STAGES * 8040


def test_tenant_whose_images_are_encoded_is_charged_for_it() -> None:
    """Another tenant's prompt that comes meanwhile is computed at once, not behind the image."""
    scheduler = make_scheduler(budget=32)
    runner = Runner(scheduler)
    before, sequence, prompt = text("before", 20, 1), seeing("i", ("x", 40)), text("prompt", 30)
    sequence.tenant, before.tenant, prompt.tenant = "images", "texts", "texts"
    scheduler.add(before)
    scheduler.add(sequence)
    for _ in range(4):
        runner.step()
    scheduler.add(prompt)
    runner.step()
    assert prompt.num_output_tokens == 1
    assert not sequence.num_output_tokens


def test_an_image_that_several_have_is_encoded_once() -> None:
    scheduler = make_scheduler(budget=200)
    runner = Runner(scheduler)
    for name in "abc":
        scheduler.add(seeing(name, ("x", 8), ("y", 8)))
    runner.finish()
    assert sum(map(encoded, runner.plans)) == 2 * 8 * STAGES


def test_more_images_than_are_kept_take_turns() -> None:
    scheduler = make_scheduler(budget=40, max_rows=20)
    runner = Runner(scheduler)
    scheduler.add(text("decode", max_tokens=150))
    for number in range(6):
        scheduler.add(seeing(str(number), *((chr(97 + (number + place) % 7), 15) for place in range(3))))
    for _ in range(400):
        if not scheduler.has_work():
            break
        runner.step()
        assert 15 * len(runner.passed) <= 20
    assert not scheduler.has_work()


def test_a_batch_image_that_waits_keeps_nobody_waiting() -> None:
    """An interactive image takes the place of one that a paused batch sequence needs."""
    scheduler = make_scheduler(budget=12, max_rows=20)
    runner = Runner(scheduler)
    batch = seeing("batch", ("b", 20))
    batch.lane = "batch"
    scheduler.add(batch)
    runner.step()
    scheduler.add(text("person"))
    runner.step()
    scheduler.add(seeing("i", ("x", 20)))
    runner.finish(400)
    forgotten = [digest for plan in runner.plans for digest in plan.forgotten]
    assert forgotten[0] == b"b" * 32


@pytest.mark.parametrize("is_preempted", [False, True])
def test_large_batch_image_keeps_its_room_beside_interactive_ones(is_preempted: bool) -> None:
    """Also while its sequence waits again: else it would begin anew for as long as people show images."""
    scheduler = make_scheduler(budget=16, max_rows=40, max_num_tokens=2000)
    runner = Runner(scheduler)
    batch = seeing("batch", ("b", 20))
    batch.lane = "batch"
    scheduler.add(batch)
    for number in range(12):
        if scheduler.has_work():
            runner.step()
        if is_preempted and batch.status is SequenceStatus.RUNNING:
            scheduler._planner.admission.preempt(batch)
        person = seeing(f"p{number}", (chr(200 + 2 * number), 20), (chr(201 + 2 * number), 20), max_tokens=1)
        scheduler.add(person)
        while not person.num_output_tokens:
            runner.step()
            assert scheduler._planner.encoder._num_rows <= 40
    assert batch.status is SequenceStatus.FINISHED
    passes = [work.end - work.first for plan in runner.plans for work in plan.encodes if work.digest == b"b" * 32]
    assert sum(passes) == 20 * STAGES


def test_a_whole_image_is_computed_in_one_step() -> None:
    scheduler = make_scheduler(budget=40, bidirectional_tokens=16)
    runner = Runner(scheduler)
    scheduler.add(text("a", 30))
    for name in "xyz":
        scheduler.add(seeing(name, (name, 16), ("w", 16), is_bidirectional=True))
    runner.finish(300)


def test_a_step_that_failed_encodes_anew() -> None:
    scheduler = make_scheduler(budget=100)
    scheduler.add(seeing("a", ("x", 8)))
    step = scheduler.schedule(0.0)
    assert step is not None
    shares = scheduler.roll_back()
    again = scheduler.schedule_again(shares, 0.0)
    assert again is not None
    assert again.plan.forgotten == [b"x" * 32]
    assert again.plan.encodes == [EncodeWork(b"x" * 32, 0, 8 * STAGES)]
    assert again.is_empty is False
    assert again.scheduled == []


def test_a_step_that_failed_leaves_the_images_of_steps_before_it() -> None:
    """What it was to forget is named again: a step that was refused has not forgotten it."""
    scheduler = make_scheduler(budget=100, max_rows=12)
    runner = Runner(scheduler)
    for name in "xy":
        scheduler.add(seeing(name, (name, 4)))
        runner.step()
    scheduler.add(seeing("z", ("z", 8)))
    failed = scheduler.schedule(0.0)
    assert failed is not None
    assert (failed.plan.forgotten, failed.plan.encodes) == ([b"x" * 32], [EncodeWork(b"z" * 32, 0, 8 * STAGES)])
    scheduler.roll_back()
    runner.step()
    assert runner.plans[-1].forgotten == [b"x" * 32, b"z" * 32]


def test_suspect_has_steps_of_its_own_only_as_far_as_the_failed_step_came() -> None:
    scheduler = make_scheduler(budget=32)
    runner = Runner(scheduler)
    scheduler.add(text("stream"))
    runner.step()
    scheduler.add(seeing("large", ("x", 40)))
    failed = scheduler.schedule(0.0)
    assert failed is not None
    scheduler.roll_back()
    assert scheduler.suspect_images(failed) is None
    runner.step()
    assert not runner.plans[-1].rows
    assert runner.plans[-1].encodes[0].end >= failed.plan.encodes[0].end
    assert runner.step().num_decodes == 1


def test_repeated_step_encodes_within_the_budget_before_it_computes() -> None:
    scheduler, budget = make_scheduler(budget=20), 20
    sequence = seeing("a", ("x", 8))
    runner = Runner(scheduler)
    scheduler.add(sequence)
    while True:
        step = scheduler.schedule(0.0)
        assert step is not None
        if any(item.start + item.num_tokens > 3 for item in step.scheduled):
            break
        scheduler.settle(step, StepResult(step.step, [SampledTokens() for _ in step.scheduled]))
    shares = scheduler.roll_back()
    runner.images = {span.digest: span for span in sequence.media}
    costs = []
    while (again := scheduler.schedule_again(shares, 0.0)) is not None and not again.scheduled:
        costs.append(runner.cost(again.plan))
        scheduler.settle(again, StepResult(again.step, []))
    assert again is not None
    assert max(costs) <= budget
    assert sum(costs) == 8 * STAGES
    assert again.plan.encodes == []


def test_aborted_sequence_leaves_no_image_behind() -> None:
    scheduler = make_scheduler(budget=16, max_rows=12)
    runner = Runner(scheduler)
    scheduler.add(text("decode", max_tokens=100))
    runner.step()
    scheduler.add(seeing("gone", ("x", 12)))
    runner.step()
    scheduler.abort("gone")
    scheduler.add(seeing("next", ("y", 12)))
    runner.finish(300)
    assert [digest for plan in runner.plans for digest in plan.forgotten] == [b"x" * 32]


def test_images_of_cancelled_sequences_do_not_pile_up_in_the_tower() -> None:
    scheduler = make_scheduler(budget=16)
    runner = Runner(scheduler)
    for number in range(6):
        sequence = seeing(str(number), (chr(97 + number), 4))
        scheduler.add(sequence)
        runner.step()
        scheduler.abort(sequence.id)
        assert runner.begun == [chr(97 + number).encode() * 32]


def test_images_pass_the_tower_one_after_the_other_whatever_their_order() -> None:
    """A batch image keeps what it has passed beside them; sequences that came first do not drop others' halves."""
    scheduler = make_scheduler(budget=16, max_rows=100)
    runner = Runner(scheduler)
    batch = seeing("batch", ("z", 12))
    batch.lane = "batch"
    scheduler.add(batch)
    runner.step()
    late = [seeing(str(number), (chr(97 + number), 12)) for number in range(3)]
    for number, sequence in enumerate(late):
        sequence.arrival, sequence.tenant = -float(number), str(number)
        scheduler.add(sequence)
        runner.step()
    runner.finish(300)
    assert not any(plan.forgotten for plan in runner.plans)
    assert sum(map(encoded, runner.plans)) == 4 * 12 * STAGES


def test_batch_image_gives_way_to_one_that_is_before_it_in_order() -> None:
    """Or both would wait: one for the tower, the other for tokens that the first one holds."""
    scheduler = make_scheduler(budget=16)
    runner = Runner(scheduler)
    later, first = seeing("later", ("x", 4), cost=10), seeing("first", ("y", 4), cost=10)
    first.token_ids += [1] * 40
    first.num_prompt_tokens += 40
    later.lane = first.lane = "batch"
    first.arrival = -1.0
    scheduler.add(later)
    runner.step()
    scheduler.add(first)
    runner.finish(100)
    assert [digest for plan in runner.plans for digest in plan.forgotten] == [b"x" * 32]


def test_images_that_can_never_be_served_are_refused() -> None:
    with pytest.raises(BadRequestError, match="An image takes 41 tokens; at most 40 are served"):
        make_scheduler().add(seeing("a", ("x", 41)))
    plain = Scheduler(SchedulerConfig(4, 200, 8, 32, 400))
    with pytest.raises(BadRequestError, match="takes no images"):
        plain.add(seeing("a", ("x", 4)))
    with pytest.raises(ValueError, match="max_num_seqs and the 30 tokens of an image, which one step computes"):
        make_scheduler(budget=32, bidirectional_tokens=30)


def test_suspect_that_was_aborted_is_not_at_fault() -> None:
    scheduler = make_scheduler()
    sequence = seeing("gone", ("x", 8))
    scheduler.add(sequence)
    for is_suspected in (False, True):
        step = scheduler.schedule(0.0)
        assert step is not None
        assert step.plan.encodes
        scheduler.roll_back()
        if is_suspected:
            scheduler.abort("gone")
        assert scheduler.suspect_images(step) is None
