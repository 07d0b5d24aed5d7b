from __future__ import annotations

import logging

import pytest

from gpu_worker.consumer.request_reader import RequestReader
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import TOKENIZER, MakeWorker, RunningWorker, TestGateway


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


REAL = {"simulate": None, "device": "cpu", "num_threads": 1, "num_blocks": 400, "max_num_seqs": 8}


@pytest.fixture(autouse=True)
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts are worth their time is measured, and another answer on a busy machine; here they are made."""
    monkeypatch.setattr("gpu_worker.start.engine_setup.AdaptiveDepth", lambda depth, **_: FixedDepth(depth))


async def test_predicted_answer_is_the_same_and_its_accepted_tokens_are_counted(
    make_worker: MakeWorker, gateway: TestGateway
) -> None:
    sampling = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    worker = await make_worker(**REAL, speculative="ngram")
    plain = await gateway.ask("def add(a, b):", sampling=sampling)
    for _ in range(3):
        answer = await gateway.ask("def add(a, b):", sampling=sampling, prediction=plain.text)
        assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text)
    usage = answer.finish.usage
    assert usage.accepted_prediction_tokens > 10
    assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens < 150
    heartbeat = await worker.wait_for_heartbeat(lambda beat: beat.spec_decode_num_drafts > 0)
    assert heartbeat.spec_decode_num_accepted_tokens >= usage.accepted_prediction_tokens
    assert heartbeat.spec_decode_num_draft_tokens >= heartbeat.spec_decode_num_accepted_tokens


async def test_stop_string_within_accepted_drafts_cuts_there(make_worker: MakeWorker, gateway: TestGateway) -> None:
    free = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    await make_worker(**REAL, speculative="ngram", num_speculative_tokens=8)
    whole = await gateway.ask("def add(a, b):", sampling=free)
    stop = whole.text[40:48]
    for _ in range(3):
        stopped = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True, stop=(stop,))
        answer = await gateway.ask("def add(a, b):", sampling=stopped, prediction=whole.text)
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert answer.finish.usage.completion_tokens == len(answer.token_ids)
        assert stop in TOKENIZER.decode(answer.token_ids)


LONG = "x = 1\n" * 200


async def test_prefix_that_another_tenant_computed_is_no_hit(worker: RunningWorker, gateway: TestGateway) -> None:
    sampling = Sampling(max_tokens=1, ignore_eos=True)
    cached = []
    for tenant in ("one", "one", "other", "other"):
        answer = await gateway.ask(LONG, tenant=tenant, sampling=sampling)
        cached.append(answer.finish.usage.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 500


async def test_request_is_named_in_log_lines_by_the_id_of_its_http_answer(
    worker: RunningWorker, gateway: TestGateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(RequestReader, "sequence", broken)
    with caplog.at_level(logging.ERROR):
        answer = await gateway.ask(trace="req_from_the_client")
    assert answer.finish.reason == "failed"
    assert [record.request_id for record in caplog.records if hasattr(record, "request_id")] == ["req_from_the_client"]


async def test_engine_is_given_the_id_for_its_log_lines(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[str] = []
    engine = worker.worker._engine
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda sequence: (traces.append(sequence.trace), add(sequence)))
    await gateway.ask(trace="req_1")
    await gateway.ask()
    assert traces == ["req_1", ""]
