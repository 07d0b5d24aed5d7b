from __future__ import annotations

import pytest

from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import TOKENIZER, RunningWorker, TestGateway


@pytest.mark.parametrize("num_emitted", [0, 1, 7, 19])
async def test_resumed_request_continues_with_exactly_the_missing_text(
    worker: RunningWorker, gateway: TestGateway, num_emitted: int
) -> None:
    sampling = Sampling(max_tokens=20, ignore_eos=True, seed=7)
    whole = await gateway.ask(sampling=sampling)
    emitted = tuple(whole.token_ids[:num_emitted])
    resumed = await gateway.ask(sampling=sampling, emitted=emitted, epoch=1)
    assert resumed.deltas[0].seq == num_emitted
    assert resumed.token_ids == whole.token_ids[num_emitted:]
    assert TOKENIZER.decode(emitted) + resumed.text == whole.text
    assert resumed.finish.usage.completion_tokens == 20


async def test_resumed_request_that_was_complete_only_ends(worker: RunningWorker, gateway: TestGateway) -> None:
    emitted = tuple(TOKENIZER.encode_text("a b c d"))
    sampling = Sampling(max_tokens=len(emitted), ignore_eos=True)
    answer = await gateway.ask(sampling=sampling, emitted=emitted)
    assert (answer.finish.reason, answer.token_ids, answer.text) == ("length", [], "")


async def test_stop_string_cuts_the_text_and_frees_the_sequence(worker: RunningWorker, gateway: TestGateway) -> None:
    free = await gateway.ask(sampling=Sampling(max_tokens=30, ignore_eos=True, seed=3))
    stop = free.text[10:16]
    sampling = Sampling(max_tokens=1500, ignore_eos=True, seed=3, stop=(stop,))
    answer = await gateway.ask(sampling=sampling)
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.finish.reason == "stop"
    assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
    assert answer.finish.usage.completion_tokens == len(answer.token_ids)
    assert stop in TOKENIZER.decode(answer.token_ids)
    await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == 0)


async def test_stop_token_counts_but_has_no_text(worker: RunningWorker, gateway: TestGateway) -> None:
    free = await gateway.ask(sampling=Sampling(max_tokens=10, ignore_eos=True, seed=4))
    last = free.token_ids[4]
    sampling = Sampling(max_tokens=10, ignore_eos=True, seed=4, stop_token_ids=(last,))
    answer = await gateway.ask(sampling=sampling)
    assert answer.finish.reason == "stop"
    assert answer.token_ids == free.token_ids[:5]
    assert answer.text == TOKENIZER.decode(free.token_ids[:4])


async def test_echo_and_prompt_logprobs_come_with_the_first_token(worker: RunningWorker, gateway: TestGateway) -> None:
    text = "def naïve(x):"
    sampling = Sampling(max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    answer = await gateway.ask(text, sampling=sampling, echo=True)
    prompt_ids = TOKENIZER.encode_text(text)
    assert answer.deltas[0].text == ""
    first = answer.deltas[1]
    assert first.text == text + TOKENIZER.decode(first.token_ids)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    rest = [entry for entry in first.prompt_logprobs if entry is not None]
    assert [entry.token_id for entry in rest] == prompt_ids[1:]
    assert text.encode().endswith(b"".join(entry.bytes for entry in rest))
    for delta in answer.deltas[1:]:
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
        assert len(delta.logprobs[0].top) == 2
    assert answer.deltas[2].prompt_logprobs is None


async def test_echo_without_new_tokens_comes_with_the_end(worker: RunningWorker, gateway: TestGateway) -> None:
    answer = await gateway.ask("a b", sampling=Sampling(max_tokens=0, prompt_logprobs=0), echo=True)
    assert (answer.text, answer.token_ids, answer.finish.reason) == ("a b", [], "length")
    assert answer.deltas[-1].prompt_logprobs is not None
    assert len(answer.deltas[-1].prompt_logprobs) == len(TOKENIZER.encode_text("a b"))
