"""A group of processes gives the tokens of one, whatever is in the mix, and after a rank has died or stood still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.block_budget import BlockBudget
from gpu_worker.core.model_runner import BrokenRunnerError, InterruptedRunnerError
from gpu_worker.core.plan import StepPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.ranks import group as group_module
from gpu_worker.execution.ranks import process as process_module
from gpu_worker.execution.ranks import runner as runner_module
from gpu_worker.execution.ranks.board import Board
from gpu_worker.execution.ranks.group import RankGroup
from gpu_worker.execution.ranks.process import LocalHost
from gpu_worker.execution.ranks.runner import build_group_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import StartUp
from gpu_worker.speculative.draft_model.proposer import DraftModelProposer
from gpu_worker.speculative.ngram.proposer import NgramProposer
from kernels.cpu_library import cpu_library
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.core.sequences import limit
from tests.gpu_worker.execution.engine_run import VOCAB, Outcome, mixed_sequences, random_prompt
from tests.gpu_worker.execution.ranks.group_run import Run, started
from tests.gpu_worker.models.recurrent_models import save_case
from tests.gpu_worker.models.variants import save_variant
from tests.waiting import wait_for


def sequences(count: int = 12) -> list[Sequence]:
    return list(mixed_sequences(count))


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-4) -> None:
    assert found.tokens == expected.tokens
    assert found.errors == expected.errors == {}
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.keys() == theirs.keys()
        for sequence, entries in theirs.items():
            for one, other in zip(ours[sequence], entries, strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]


def check(
    directory: Path, size: int, proposer: Proposer | None = None, budget: BlockBudget | None = None, **settings: Any
) -> None:
    """Answer the same sequences alone and as a group: with room, with preemptions, and with drafts.

    Every third one, of which some have grammars, gets the budget.
    """

    def sequences() -> list[Sequence]:
        found = list(mixed_sequences(12))
        return found if budget is None else [limit(s, budget) if s.id[-1] in "147" else s for s in found]

    ways: tuple[dict[str, Any], ...] = ({}, {"num_blocks": 32}, {"proposer": proposer or NgramProposer(100_000)})
    with started(directory, 1) as (alone, _):
        expected = [alone.answer(sequences(), **way) for way in ways]
    with started(directory, size, **settings) as (run, group):
        for way, outcome in zip(ways, expected, strict=True):
            assert_same(run.answer(sequences(), **way), outcome)
        assert group is not None
        (*_, last) = group._processes.values()
        for rank in range(1, size):
            replace_rank(run, group, rank, signal.SIGKILL if rank % 2 else signal.SIGSTOP)
        # The silence of a process that was replaced loses no group.
        group._froze(last, 1.0)
        assert group.lost is None
        # What was drafted and cached before is of no use now; the answers are the same.
        for way, outcome in zip(ways, expected, strict=True):
            assert_same(run.answer(sequences(), **way), outcome)
        assert [each.loads for each in group.readings()] == [1, *[2] * (size - 1)]
        pids = group.pids.values()
    assert expected[1].num_preemptions > 0
    assert_gone(pids)


def replace_rank(run: Run, group: RankGroup, rank: int, number: signal.Signals) -> None:
    """Hurt a rank while steps are computed: all fail soon, with its name, and another process takes its place."""
    lost: list[float] = []
    group.on_lost = lambda: lost.append(time.monotonic())
    steps = begin(run)
    for _ in range(5):
        next(steps)
    before, loads = group.pids, [each.loads for each in group.readings()]
    os.kill(before[rank], number)
    hurt = time.monotonic()
    with pytest.raises(InterruptedRunnerError, match=f"rank {rank}") as interruption:
        deque(steps)
    assert interruption.value.is_logged
    assert time.monotonic() - hurt < 1.5
    assert group.lost is not None
    # The group's own thread says so, a moment after the step that it let fail.
    wait_for(lambda: lost)
    assert lost[0] - hurt < 1.5
    interruption.value.recover()
    assert group.lost is None
    loads[rank] += 1
    # Of another host it is known with the next pulse.
    wait_for(lambda: [each.loads for each in group.readings()] == loads, 5)
    assert [each for each, pid in group.pids.items() if before[each] != pid] == [rank]


def assert_gone(pids: Iterable[int]) -> None:
    for pid in set(pids) - {os.getpid()}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_two_ranks_give_the_tokens_of_one_before_and_after_one_is_killed(directory: Path) -> None:
    check(directory, 2, budget=BlockBudget(4, 1, 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "lfm2", "mamba2", "bamba"])
def test_recurrent_models_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    save_case(name, tmp_path, eos_token_id=None)
    check(tmp_path, 2)


def begin(run: Run) -> Iterator[None]:
    """Return what steps an engine that has work, again and again."""
    engine = run.engine()
    prompt = random_prompt(8, seed=1)
    sampling = Sampling(temperature=0.0)
    engine.add(Sequence("long", prompt, len(prompt), sampling, max_tokens=140))
    while True:
        engine.step()
        yield


@pytest.mark.slow
def test_ranks_that_meet_by_torch_give_the_tokens_of_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "cpu_library", lambda: None)
    check(directory, 2)


@pytest.mark.slow
def test_ranks_verify_the_drafts_of_a_model_that_rank_0_alone_has(directory: Path) -> None:
    settings = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 6, "num_threads": 1}
    runner = build_runner(RunnerConfig(directory, **settings, keeps_all_tokens=True))
    sizes = {"vocab_size": VOCAB, "max_model_len": runner.max_model_len, "max_num_batched_tokens": 32}
    check(directory, 2, DraftModelProposer(runner, **sizes))


@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    save_variant("llama", tmp_path)
    check(tmp_path, 4)


def test_rank_that_freezes_in_a_step_is_replaced(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(directory, 2) as (run, group):
        assert group is not None
        replace_rank(run, group, 1, signal.SIGSTOP)
        pids = group.pids.values()
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [error.startswith("the group of ranks is lost: rank 1 (process ") for error in errors] == [True]
    assert "has stood still" in errors[0]
    assert_gone(pids)


@pytest.mark.slow
def test_rank_that_freezes_while_nothing_runs_is_missed(directory: Path) -> None:
    with started(directory, 2) as (run, group):
        assert group is not None
        os.kill(group.pids[1], signal.SIGSTOP)
        hurt = time.monotonic()
        while group.lost is None:
            time.sleep(0.01)
            assert time.monotonic() - hurt < 1.5
        assert "has stood still" in group.lost
        with pytest.raises(InterruptedRunnerError):
            next(begin(run))


@pytest.mark.slow
def test_rank_that_fails_within_a_step_keeps_its_weights(directory: Path) -> None:
    with started(directory, 2) as (run, group):
        assert group is not None
        before = group.pids
        steps = begin(run)
        next(steps)
        # A row that nobody has: rank 1 cannot compute that, and rank 0 waits for it.
        group.tell(StepPlan(7, [5], [0], 1, num_decodes=1, token_ids=[1]), None)
        reason = r"rank 1 \(process \d+\) failed within a step: KeyError"
        with pytest.raises(InterruptedRunnerError, match=reason) as interruption:
            deque(steps)
        interruption.value.recover()
        assert group.pids == before
        assert [each.loads for each in group.readings()] == [1, 1]
        next(begin(run))


@pytest.mark.slow
def test_ranks_that_die_again_and_again_while_they_load_break_the_runner(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with started(directory, 2) as (run, group):
        assert group is not None
        monkeypatch.setattr(process_module, "_MEMBER", "tests.gpu_worker.execution.ranks.dying_member")
        os.kill(group.pids[1], signal.SIGKILL)
        wait_for(lambda: group.lost)
        with pytest.raises(InterruptedRunnerError) as interruption:
            next(begin(run))
        with pytest.raises(BrokenRunnerError, match=r"rank 1 \(process \d+\) ended with status 3"):
            interruption.value.recover()
        assert "the group of ranks cannot be formed again: rank 1 (process " in caplog.messages[-1]
        with pytest.raises(BrokenRunnerError):
            next(begin(run))


def test_timer_of_a_lost_group_runs_before_anybody_can_stop_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = RankGroup(config(directory), exits_when_stuck=True)
    seen: list[str | None] = []

    def slow(seconds: float) -> threading.Timer:
        seen.append(group.lost)
        return threading.Timer(seconds, lambda: None)

    monkeypatch.setattr(group_module, "exit_within", slow)
    group.end("rank 1 is gone")
    group.close()
    # Who sees that it is lost stops the timer at once; one that began later would end a worker that serves again.
    assert seen == [None]


def run_python(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a script whose arguments are in `sys.argv`."""
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_ranks_end_with_rank_0_also_when_that_is_killed_in_a_step(directory: Path) -> None:
    script = """
import sys
from pathlib import Path
from tests.gpu_worker.execution.ranks.group_run import started
from tests.gpu_worker.execution.ranks.test_group import begin
with started(Path(sys.argv[1]), 2) as (run, group):
    steps = begin(run)
    next(steps)
    print(group.pids[1], flush=True)
    for _ in steps:
        pass
"""
    with run_python(script, str(directory)) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        process.kill()
    since = time.monotonic()
    while Path(f"/proc/{rank}/cmdline").exists() and b"ranks.member" in Path(f"/proc/{rank}/cmdline").read_bytes():
        time.sleep(0.02)
        assert time.monotonic() - since < 2


@pytest.mark.slow
def test_process_that_does_not_leave_in_time_is_ended() -> None:
    script = "import time\nfrom gpu_worker.execution.ranks.watch import exit_within\nexit_within(0.1)\ntime.sleep(600)"
    with run_python(script) as process:
        assert process.wait(60) == 1


@pytest.mark.slow
def test_rank_that_cannot_load_is_told_in_a_sentence(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(config(directory), num_blocks=None, kv_cache_bytes=1 << 50)
    group = RankGroup(few)
    pids = group.pids.values()

    def build(*arguments: Any) -> Any:
        """Fail after the other rank, which is busy elsewhere."""
        try:
            return build_runner(*arguments)
        except Exception:
            wait_for(lambda: group.lost)
            raise

    monkeypatch.setattr(runner_module, "build_runner", build)
    with pytest.raises(ConfigError, match=r"is 2, but rank 1 \(process \d+\) failed: "):
        build_group_runner(few, group, StartUp())
    assert_gone(pids)


def config(directory: Path) -> RunnerConfig:
    return RunnerConfig(directory, block_size=4, num_blocks=60, num_threads=1, tensor_parallel_size=2)


def test_ranks_have_room_to_sum_the_stream_of_the_largest_step(directory: Path) -> None:
    large = replace(config(directory), max_num_batched_tokens=50_000)
    library = cpu_library()
    assert library is not None, "the tests need g++"
    host = LocalHost(large, is_shared=True, log_level="info", log_format="text")
    # What another rank makes of the descriptor is the same.
    for board in (host.board, Board(os.dup(host.board.fd), 2)):
        assert board.exchange(1, library).slot_bytes >= 4 * 48 * 50_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "version of Headrace", "setting max_num_seqs"])
def test_rank_of_another_version_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    own = group_module.identity
    monkeypatch.setattr(group_module, "identity", lambda config: {**own(config), name: "0.0.9"})
    problem = rf"is 2, but rank 1 has another {name}: \d.*, and rank 0 has 0\.0\.9"
    with pytest.raises(ConfigError, match=problem):
        RankGroup(config(directory))


def test_settings_that_differ_are_told_by_name(directory: Path) -> None:
    one, other = (
        group_module.identity(replace(config(directory), max_num_seqs=number, num_threads=number)) for number in (3, 4)
    )
    assert [name for name in one if one[name] != other[name]] == ["setting max_num_seqs"]


def test_rank_that_never_comes_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_MEETING_S", 0.3)
    monkeypatch.setattr(process_module, "_MEMBER", "tests.gpu_worker.execution.ranks.silent_member")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"rank 1 did not answer within 0\.3 s"):
        RankGroup(config(directory))
    assert time.monotonic() - began < 5
