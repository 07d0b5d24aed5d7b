"""Prefixes that left the device's memory come back from the host's, and give the bits of a cold start."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.core.tiers import Wanted
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.tiers.block_load import BlockLoad
from gpu_worker.execution.tiers.block_tiers import BlockTiers
from gpu_worker.execution.tiers.host_tier import HostTier
from shared.cache_hints import CacheHints
from shared.errors import ConfigError
from tests.gpu_worker.execution.engine_run import random_prompt
from tests.gpu_worker.execution.tiered_engine import (
    OF_ALL_KINDS,
    OPENED,
    Models,
    PatientTiers,
    Served,
    greedy,
    sequence,
)
from tests.waiting import wait_for

PROMPT = random_prompt(61, seed=3)


def num_cached(served: Served, prompt: list[int] = PROMPT, **settings: Any) -> int:
    """Serve a prompt; return of how many of its tokens there was KV."""
    asked = sequence("again", prompt, **settings)
    served.serve(asked)
    return asked.num_cached_tokens


@OF_ALL_KINDS
def test_a_prefix_that_was_overwritten_comes_back_and_gives_the_same_answer(
    name: str, settings: dict[str, object], models: Models
) -> None:
    cold = Served(models.open(name, **settings), host_bytes=None)
    expected = cold.serve(sequence("cold", PROMPT))
    served = Served(models.open(name, **settings))
    first = served.serve(sequence("first", PROMPT))
    served.fill()
    again = sequence("again", PROMPT)
    assert first == expected
    assert served.serve(again) == expected
    assert served.hit_tokens() > 0
    assert again.num_cached_tokens == 60


@pytest.fixture
def served(models: Models) -> Served:
    return Served(models.open("llama"))


def test_a_turn_that_goes_on_from_an_answer_finds_it(served: Served) -> None:
    prompt = random_prompt(30, seed=8)
    ((answer, _),) = served.serve(sequence("turn", prompt, sampling=greedy(12)))
    served.fill()
    assert num_cached(served, [*prompt, *answer, 1, 2, 3]) >= 40


def test_another_salt_finds_nothing(served: Served) -> None:
    served.serve(sequence("one", PROMPT, salt=b"tenant"))
    served.fill()
    assert num_cached(served, salt=b"another") == 0
    assert served.hit_tokens() == 0
    served.fill()
    assert num_cached(served, salt=b"tenant") == 60


def test_a_preempted_sequence_goes_on_from_what_was_kept(models: Models) -> None:
    prompts = [random_prompt(34, seed=seed) for seed in range(3)]
    long = greedy(40)
    cold = Served(models.open("llama"), host_bytes=None)
    expected = [cold.serve(sequence(str(n), prompt, sampling=long))[0] for n, prompt in enumerate(prompts)]
    served = Served(models.open("llama"))
    got = served.serve(*(sequence(str(n), prompt, sampling=long) for n, prompt in enumerate(prompts)))
    assert served.scheduler.stats.num_preemptions > 0
    assert served.hit_tokens() > 0
    assert got == expected


def test_a_request_that_is_aborted_while_it_waits_for_its_prefix_leaves_nothing_behind(served: Served) -> None:
    served.serve(sequence("first", PROMPT))
    served.fill()
    tiers = served.tiers
    assert tiers is not None
    # Its own thread waits at the queue of before.
    tiers._loads = SimpleQueue()
    served.engine.add(sequence("again", PROMPT))
    served.engine.step()
    assert served.engine.stats.waiting == 1
    served.engine.abort("again")
    assert not served.engine.has_work()
    served.scheduler.check_integrity()
    # The block belongs to nobody now; its content must stay as it is.
    before = [memory.clone() for memory in served.runner.cache.layers[0].tensors]
    tiers._loads.put(None)
    tiers._load_all()
    assert tiers._loads.empty()
    assert all(map(torch.equal, before, served.runner.cache.layers[0].tensors))


def test_a_load_that_hangs_costs_a_second_and_no_answer(served: Served) -> None:
    (expected,) = served.serve(sequence("first", PROMPT))
    served.fill()
    assert served.tiers is not None
    served.tiers._loads = SimpleNamespace(put=lambda load: None)  # type: ignore[assignment]
    again = sequence("again", PROMPT)
    assert served.serve(again) == [expected]
    assert again.num_cached_tokens == 0


def test_what_may_be_wrong_is_forgotten(served: Served) -> None:
    first = sequence("first", PROMPT)
    served.serve(first)
    served.fill()
    assert served.tiers is not None
    served.tiers.forget(first.block_digests)
    assert num_cached(served) == 0


def test_memory_that_holds_no_block_is_refused(served: Served) -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_KV_HOST_BYTES: is 100, which holds no block of each kind; \d+ do"):
        HostTier(served.runner.block_contents, 100)


def test_memory_for_few_blocks_keeps_what_was_used_last(models: Models) -> None:
    runner = models.open("llama")
    row_bytes = runner.block_contents[0].row_bytes
    served = Served(runner, host_bytes=20 * row_bytes)
    served.serve(sequence("first", PROMPT))
    served.fill()
    again = sequence("again", PROMPT)
    served.serve(again)
    assert again.num_cached_tokens == 0
    assert served.tiers is not None
    served.tiers.flush()
    wait_for(lambda: all(served.tiers.has(0, digest) for digest in again.block_digests[:15]))  # type: ignore[union-attr]
    (reading,) = served.tiers.readings()
    assert reading.used_bytes == reading.total_bytes == 20 * row_bytes
    assert reading.evicted > 0


def test_block_for_which_no_row_is_left_is_dropped_and_counted(served: Served) -> None:
    groups = served.runner.block_contents
    host = HostTier(groups, 2 * groups[0].row_bytes)
    batch = host.keep(0, [(number, bytes([number]) * 32, b"") for number in range(3)])
    assert batch is not None
    assert [kept.digest for kept in host.settle(batch)] == [bytes([number]) * 32 for number in range(2)]
    assert (host.num_dropped, host.num_evicted) == (1, 0)


def test_nothing_is_written_behind_the_end_of_a_load() -> None:
    """A thread that reads a disk comes back late, with a content whose block belongs to others by now."""
    load = BlockLoad(b"", [Wanted(0, b"d" * 32, 3), Wanted(0, b"e" * 32, 4)], [None])
    (first, _), (second, _) = load.take() or (0, None), load.take() or (0, None)
    written: list[int] = []
    assert load.write(first, lambda: written.append(first))
    assert load.end() == [True, False]
    assert not load.write(second, lambda: written.append(second))
    assert written == [first]
    assert load.take() is None


def test_a_device_that_runs_behind_gives_the_same_answers(models: Models, served: Served) -> None:
    prompts = [random_prompt(61, seed=3), *(random_prompt(50, seed=seed) for seed in range(4, 8))]
    expected = [served.serve(sequence(str(number), prompt))[0] for number, prompt in enumerate(prompts)]
    runner = models.open("llama")
    behind = TorchModelRunner(runner.model, runner.cache, 4, runner.max_model_len, 32, is_asynchronous=True)
    assert behind.max_steps_in_flight == 2
    engine = Served(behind)
    for turn in range(2):
        sequences = [sequence(f"{turn}-{number}", prompt) for number, prompt in enumerate(prompts)]
        assert [[token_ids for token_ids, _ in engine.serve(each)] for each in sequences] == [[e[0]] for e in expected]
    assert engine.hit_tokens() > 100


def test_short_prompts_alone_tell_tiers_how_fast_prompts_are_computed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    prefill_rate = property(lambda tiers: 0.0, lambda tiers, rate: told.append(rate))
    monkeypatch.setattr(PatientTiers, "prefill_rate", prefill_rate)
    for seed in range(4):
        served.serve(sequence(str(seed), random_prompt(9 + seed, seed=seed)))
    stats = served.engine.stats
    assert stats.prefill_rate == 0.0, "no step was full"
    assert stats.expected_prefill_rate > 0.0
    assert told[-1] > 0.0


def test_a_load_that_measured_slower_than_computing_is_not_begun_but_for_one_in_32(served: Served) -> None:
    groups = served.runner.block_contents
    tiers, wanted = BlockTiers(groups, 4, HostTier(groups, 1 << 20)), [(0, b"d" * 32)] * 10
    OPENED.callback(tiers.close)
    tiers.prefill_rate = 1000.0
    assert tiers.pays(wanted, 40), "nothing is known yet"
    tiers._meters["files"].observe(groups[0].row_bytes * 10, 0.039, 40)
    assert tiers.pays(wanted, 40)
    tiers._meters["files"].observe(groups[0].row_bytes * 10, 0.043, 40)
    assert [tiers.pays(wanted, 40) for _ in range(64)] == [number % 32 == 31 for number in range(64)]


def keep(host: HostTier, *numbers: int) -> None:
    """Keep contents one after the other."""
    for number in numbers:
        batch = host.keep(0, [(number % 4, name(number), b"")])
        assert batch is not None
        batch.copy.wait()
        host.settle(batch)


def name(number: int) -> bytes:
    return bytes([number]) * 32


def kept(host: HostTier) -> list[int]:
    return [number for number in range(100) if host.knows(0, name(number))]


def test_memory_keeps_what_is_retained_until_its_time_and_no_longer(served: Served) -> None:
    groups, now = served.runner.block_contents, [0.0]
    host = HostTier(groups, 4 * groups[0].row_bytes, retained_share=0.5, clock=lambda: now[0])
    keep(host, 0, 1, 2, 3)
    # Half of the rows at most; the beginning of a prefix before its end.
    host.retain("a", 1.0, [name(number) for number in (0, 1, 2)], until=60.0)
    row_bytes = groups[0].row_bytes
    assert (host.retained_bytes, host.used_bytes, host.stored_bytes) == (2 * row_bytes, 4 * row_bytes, 4 * row_bytes)
    now[0] = 59.0
    keep(host, 4, 5, 6, 7)
    assert kept(host) == [0, 1, 6, 7]
    assert (host.stored_bytes, host.num_evicted) == (8 * row_bytes, 4)
    host.spend([name(0)])
    keep(host, 8)
    assert kept(host) == [1, 6, 7, 8]
    # From then on it is one of all, as if it had just been used.
    now[0] = 60.0
    keep(host, 9)
    assert kept(host) == [1, 7, 8, 9]
    keep(host, 10, 11, 12)
    assert kept(host) == [9, 10, 11, 12]


def test_tenants_share_what_may_be_retained_by_their_weights(served: Served) -> None:
    groups = served.runner.block_contents
    host = HostTier(groups, 8 * groups[0].row_bytes, retained_share=0.5, clock=lambda: 0.0)
    keep(host, *range(8))
    host.retain("a", 3.0, [name(number) for number in range(4)], until=60.0)
    host.retain("b", 1.0, [name(number) for number in range(4, 8)], until=60.0)
    keep(host, *range(8, 12))
    assert kept(host) == [0, 1, 2, 4, 8, 9, 10, 11]


def test_rows_that_are_held_are_neither_evicted_nor_walked_past(served: Served) -> None:
    groups = served.runner.block_contents
    host = HostTier(groups, 5 * groups[0].row_bytes)
    keep(host, 0, 1, 2, 3, 4)
    held = host.hold([name(number) for number in (0, 1, 2)])
    again = host.hold([name(2)])
    assert len(host._orders[0]) == 2
    keep(host, 5, 6, 7)
    assert kept(host) == [0, 1, 2, 6, 7]
    host.spend([name(1)])
    assert host.has(0, name(0))
    host.forget([name(0)])
    host.let_go(held)
    # The row of what was forgotten is free, then what was spent goes; one is still held.
    keep(host, 8, 9)
    assert kept(host) == [2, 6, 7, 8, 9]
    keep(host, 10, 11, 12, 13)
    assert kept(host) == [2, 10, 11, 12, 13]
    host.let_go(again)
    keep(host, 14, 15, 16, 17, 18)
    assert kept(host) == [14, 15, 16, 17, 18]


def test_rows_that_were_spent_while_held_and_used_again_do_not_go_first(served: Served) -> None:
    groups = served.runner.block_contents
    host = HostTier(groups, 4 * groups[0].row_bytes, retained_share=0.25, clock=lambda: 0.0)
    keep(host, 0, 1, 2, 3)
    held = host.hold([name(number) for number in range(4)])
    host.spend([name(number) for number in range(4)])
    # The quota has room for the first alone.
    host.retain("a", 1.0, [name(0), name(1)], until=60.0)
    assert host.has(0, name(2))
    host.let_go(held)
    keep(host, 4, 5)
    assert kept(host) == [0, 2, 4, 5]
    keep(host, 6, 7, 8)
    assert kept(host) == [0, 6, 7, 8]


def test_a_conversation_is_retained_in_the_host_s_memory_and_dropped_there(models: Models) -> None:
    runner = models.open("llama")
    served = Served(runner, host_bytes=36 * runner.block_contents[0].row_bytes, retained_share=0.5)
    served.serve(sequence("first", PROMPT, hints=CacheHints(session_id="s", retain_s=600.0)))
    served.fill()
    assert num_cached(served, hints=CacheHints(session_id="s", drop=True)) == 60
    assert served.hit_tokens() > 0
    # The room of as many blocks is needed, and those of the conversation go for it.
    served.serve(sequence("other", random_prompt(61, seed=4)))
    assert num_cached(served) == 0


def test_of_contents_that_were_not_found_nothing_is_kept(models: Models) -> None:
    tiers = Served(models.open("llama")).tiers
    assert tiers is not None
    missing = [Wanted(0, bytes([number]) * 32, number) for number in range(8)]
    load = tiers.load(b"tenant", missing)
    wait_for(lambda: load.num_ended == len(missing))
    assert (load.end(), tiers._salts) == ([False] * len(missing), {})


def test_of_a_content_that_comes_after_its_load_has_ended_nothing_is_kept(models: Models) -> None:
    tiers = Served(models.open("llama")).tiers
    assert tiers is not None
    wanted = Wanted(0, bytes(32), 0)
    load = BlockLoad(b"tenant", [wanted], [group.mark() for group in tiers._groups])
    row = np.zeros(tiers._groups[0].row_bytes, np.uint8)
    assert tiers._land(load, 0, wanted, row)
    assert tiers._salts.pop(wanted.digest) == b"tenant"
    load.end()
    assert not tiers._land(load, 0, wanted, row)
    assert tiers._salts == {}
