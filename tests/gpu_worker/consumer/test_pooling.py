"""Vectors and scores through both lanes: asked for on the wire, computed as prompts, answered at once."""

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from gpu_worker.consumer.answer import PooledAnswers
from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.text.model_tasks import EmbeddingForm, ModelTasks, ScoreForm, Unserved
from shared.errors import BadRequestError
from shared.messages import Request
from shared.pooling import Pooling
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway, fresh_name

SIZE = 256
EMBED, SCORE = Pooling(), Pooling(task="score", query="what is x?")
LAST_LOGIT = PoolingPlan("last", "classes")


def numbers(vector: bytes | None) -> Any:
    assert vector is not None
    return np.frombuffer(vector, dtype="<f4")


async def test_vector_comes_in_the_last_delta_and_counts_no_generated_token(
    gateway: TestGateway, worker: RunningWorker
) -> None:
    answer = await gateway.ask("x = 1", pooling=EMBED, sampling=Sampling())
    assert (answer.finish.reason, answer.token_ids, answer.text) == ("stop", [], "")
    assert answer.finish.usage.completion_tokens == 0
    assert answer.finish.usage.prompt_tokens == answer.deltas[0].prompt_tokens > 0
    assert len(numbers(answer.finish.vector)) == SIZE
    assert np.linalg.norm(numbers(answer.finish.vector)) == pytest.approx(1.0)
    again = await gateway.ask(None, token_ids=tuple(range(5, 45)), pooling=EMBED)
    assert not np.array_equal(numbers(again.finish.vector), numbers(answer.finish.vector))
    await gateway.wait_until_acknowledged()


async def test_score_lies_between_zero_and_one(gateway: TestGateway, worker: RunningWorker) -> None:
    answer = await gateway.ask("x = 1", pooling=SCORE)
    (score,) = numbers(answer.finish.vector)
    assert 0.0 < score < 1.0
    assert answer.finish.usage.completion_tokens == 0


async def test_heartbeat_says_what_the_model_can_do(worker: RunningWorker) -> None:
    heartbeat = await worker.wait_for_heartbeat(lambda heartbeat: True)
    assert heartbeat.tasks == ("generate", "embed", "score")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pooling": Pooling(dimensions=SIZE + 1)}, "dimensions"),
        ({"pooling": Pooling(task="score")}, "query"),
        ({"pooling": Pooling(task="score", query="q"), "text": None, "token_ids": (1, 2)}, "query"),
        ({"pooling": Pooling(task="score", query="q", dimensions=3)}, "dimensions"),
        ({"pooling": Pooling(query="q")}, "pooling"),
        ({"pooling": EMBED, "emitted": (1,)}, "pooling"),
        ({"pooling": EMBED, "echo": True}, "pooling"),
        ({"pooling": EMBED, "text": None, "token_ids": (4096,)}, "prompt"),
        ({"pooling": EMBED, "text": None, "token_ids": (1,) * 2049}, "prompt"),
    ],
)
async def test_request_that_cannot_be_answered_names_its_field(
    gateway: TestGateway, worker: RunningWorker, fields: dict[str, Any], param: str
) -> None:
    answer = await gateway.ask(**{"text": "x = 1", **fields})
    assert (answer.finish.reason, answer.finish.error_param) == ("failed", param)


async def test_prompt_may_fill_the_whole_context(gateway: TestGateway, worker: RunningWorker) -> None:
    answer = await gateway.ask(None, token_ids=(1,) * 2048, pooling=EMBED)
    assert answer.finish.reason == "stop"
    refused = await gateway.ask(None, token_ids=(1,) * 2049, pooling=EMBED)
    assert "2049 tokens, and at most 2048 can fit" in refused.finish.error


@pytest.mark.parametrize("pooling", [EMBED, SCORE])
async def test_batch_job_stores_the_same_numbers(gateway: TestGateway, worker: RunningWorker, pooling: Pooling) -> None:
    job = Request(id=fresh_name("job"), model=gateway.model, tenant="acme", text="x = 1", pooling=pooling)
    await gateway.publish_job(job)
    result = await gateway.result(job.id)
    direct = await gateway.ask("x = 1", pooling=pooling)
    assert (result.finish, result.text, result.completion_tokens) == ("stop", "", 0)
    assert result.prompt_tokens == direct.finish.usage.prompt_tokens
    assert result.vector == direct.finish.vector
    assert base64.b64decode(msgspec.json.decode(msgspec.json.encode(result))["vector"]) == result.vector


def computed(plan: PoolingPlan, *parts: list[float]) -> Sequence:
    pooled = [np.array(part, dtype=np.float64).tobytes() for part in parts]
    return Sequence("s", [1, 2, 3, 4], 4, Sampling(), 0, pooling=plan, pooled=pooled)


def test_vector_is_cut_behind_the_matrices_that_follow_the_pooling() -> None:
    form = EmbeddingForm("mean", False, 3, dense=(lambda values: values[::-1], lambda values: values + 1))
    answers = PooledAnswers(ModelTasks(False, form, Unserved("")))
    sequence = computed(PoolingPlan("mean"), [8.0, 12.0, 4.0], [4.0, 4.0, 100.0])
    assert numbers(answers.vector(Pooling(dimensions=2), sequence)).tolist() == [27.0, 5.0]


def test_mean_is_cut_before_it_is_scaled() -> None:
    form = EmbeddingForm("mean", True, 3)
    answers = PooledAnswers(ModelTasks(False, form, Unserved("")))
    sequence = computed(PoolingPlan("mean"), [8.0, 12.0, 4.0], [4.0, 4.0, 100.0])
    assert numbers(answers.vector(Pooling(normalize=False), sequence)).tolist() == [3.0, 4.0, 26.0]
    assert numbers(answers.vector(Pooling(dimensions=2), sequence)).tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("form", "logits", "score"),
    [
        (ScoreForm(LAST_LOGIT, "sigmoid"), [0.5], 1 / (1 + math.exp(-0.5))),
        (ScoreForm(LAST_LOGIT, "identity"), [-2.5], -2.5),
        (ScoreForm(PoolingPlan("last", (3, 7)), "sigmoid"), [1.0, 3.0], 1 / (1 + math.exp(-2.0))),
        (ScoreForm(PoolingPlan("last", (7,)), "sigmoid"), [-2000.0], 0.0),
    ],
)
def test_score_is_made_of_logits_as_the_files_say(form: ScoreForm, logits: list[float], score: float) -> None:
    answers = PooledAnswers(ModelTasks(True, Unserved(""), form))
    assert numbers(answers.vector(SCORE, computed(form.plan, logits))).tolist() == pytest.approx([score])


def test_default_words_stand_before_texts_of_vectors_only() -> None:
    form = EmbeddingForm("mean", False, 4, prompts={"query": "Find: "}, default_prompt="Any: ")
    answers = PooledAnswers(ModelTasks(True, form, ScoreForm(LAST_LOGIT, "sigmoid")))
    asked = (Pooling(), Pooling(input_type="query"), Pooling(input_type="document"), SCORE, None)
    texts = [answers.text(Request(id="r", model="m", text="x", pooling=pooling)) for pooling in asked]
    assert texts == ["Any: x", "Find: x", "x", "x", "x"]
    assert answers.text(Request(id="r", model="m", token_ids=(1,), pooling=Pooling())) is None


def test_model_refuses_what_it_cannot_do_and_says_why() -> None:
    answers = PooledAnswers(ModelTasks(False, Unserved("its pooling is max"), Unserved("it has no head that scores")))
    for pooling, reason in ((None, "generates no text"), (EMBED, "its pooling is max"), (SCORE, "it has no head")):
        with pytest.raises(BadRequestError, match=reason) as caught:
            answers.check(Request(id="r", model="m", text="x", pooling=pooling))
        assert caught.value.param == "model"
