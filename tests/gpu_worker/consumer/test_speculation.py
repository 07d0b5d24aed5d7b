"""A worker that speculates answers like one that does not, and says how much it guessed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import TOKENIZER, RunningWorker, TestGateway

REAL = {"simulate": None, "device": "cpu", "num_threads": 1, "num_blocks": 400, "max_num_seqs": 8}
MakeWorker = Callable[..., Awaitable[RunningWorker]]


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
