"""Requests with a grammar, from the queue to the answer. The simulated engine draws among the allowed tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from typing import Any

import msgspec
import pytest

from gpu_worker.consumer import constraint_source
from gpu_worker.consumer.constraint_source import CompilerBusyError, ConstraintSource
from gpu_worker.structured_output import grammar_budget, grammar_constraint
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.conversation import ChatMessage, ChatOptions
from shared.errors import BadRequestError
from shared.grammar import GRAMMAR_PARAM, Grammar
from shared.grammar.checker import CheckerBusyError
from shared.limited_link import LimitedProcessError
from shared.messages import Request
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import DEMO_MODEL, TOKENIZER, RunningWorker, TestGateway

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "color": {"enum": ["red", "green"]}},
    "required": ["name", "color"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(kind="json_schema", source=json.dumps(SCHEMA))


def sampling_of(grammar: Grammar = GRAMMAR, **options: Any) -> Sampling:
    return Sampling(**{"max_tokens": 400, "grammar": grammar, **options})


@pytest.mark.parametrize("seed", range(3))
async def test_text_is_a_document_of_the_schema(worker: RunningWorker, gateway: TestGateway, seed: int) -> None:
    answer = await gateway.ask(sampling=sampling_of(seed=seed))
    document = json.loads(answer.text)
    assert set(document) == {"name", "color"}
    assert document["color"] in ("red", "green")
    assert answer.finish.reason == "stop"
    assert answer.finish.usage.completion_tokens == len(answer.token_ids)


async def test_answer_goes_on_in_the_middle_of_a_document(worker: RunningWorker, gateway: TestGateway) -> None:
    whole = await gateway.ask(sampling=sampling_of(seed=7))
    for count in range(0, len(whole.token_ids) + 1, 5):
        emitted = tuple(whole.token_ids[:count])
        rest = await gateway.ask(sampling=sampling_of(seed=7), emitted=emitted, epoch=1)
        assert rest.token_ids == whole.token_ids[count:]
        assert whole.text.endswith(rest.text)
        assert (rest.text == "") == (count == len(whole.token_ids))
        assert rest.finish.reason == "stop"


async def test_text_ends_with_the_last_token_of_a_complete_grammar(worker: RunningWorker, gateway: TestGateway) -> None:
    answer = await gateway.ask(sampling=sampling_of(Grammar(kind="regex", source="(yes|no)!")))
    assert answer.text in ("yes!", "no!")
    assert answer.finish.reason == "stop"


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar(kind="regex", source="("), "reg"),
        (Grammar(kind="json_schema", source='{"type": "nonsense"}'), "nonsense"),
        (Grammar(kind="json_schema", source='{"$ref": "https://example.com/schema"}'), "example.com"),
        (Grammar(kind="lark", source="start: missing"), "missing"),
    ],
)
async def test_grammar_that_cannot_be_compiled_is_refused_with_the_reason(
    worker: RunningWorker, gateway: TestGateway, grammar: Grammar, problem: str
) -> None:
    answer = await gateway.ask(sampling=sampling_of(grammar))
    assert answer.finish.reason == "failed"
    assert answer.finish.error_param == GRAMMAR_PARAM
    assert problem in answer.finish.error
    assert (await gateway.ask()).finish.reason == "length", "others are served"


async def test_worker_whose_checker_does_not_start_leaves_grammars_to_others_until_it_does(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = worker.worker.consumer._interactive._intake._constraints._checker._link
    may_start, start = asyncio.Event(), link.start

    async def start_if_it_may() -> None:
        if not may_start.is_set():
            raise LimitedProcessError("it does not start")
        await start()

    monkeypatch.setattr(link, "start", start_if_it_may)
    monkeypatch.setattr(constraint_source, "RESTART_S", 0.1)
    monkeypatch.setattr(constraint_source, "MAX_RESTARTS", 10_000)
    assert (await gateway.ask(sampling=sampling_of(seed=1))).finish.reason == "handoff"
    waiting = await gateway.publish(gateway.request(sampling=sampling_of(seed=1)))
    assert (await gateway.ask()).finish.reason == "length", "others are served"
    assert waiting.deltas == []
    may_start.set()
    assert (await waiting.wait()).finish.reason == "stop"


async def test_batch_request_follows_its_grammar(worker: RunningWorker, gateway: TestGateway) -> None:
    request = gateway.request(lane="batch", tenant="acme", reply=None, sampling=sampling_of(seed=1))
    await gateway.publish_job(request)
    result = await gateway.result(request.id)
    assert set(json.loads(result.text)) == {"name", "color"}
    assert result.finish == "stop"


ENDLESS_LEXEME = r"~/(.*a(.{14}))/ & ~/(.*b.{15})/ & /(.*c.{16})/ & ~/(.*d.{17})/"


def request_with(grammar: Grammar | None) -> Request:
    return Request(id="r", model="m", text="x", sampling=msgspec.structs.replace(sampling_of(), grammar=grammar))


def chain(length: int) -> dict[str, Any]:
    """Return definitions of which each refers to the next."""
    links = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(length)}
    return {**links, f"d{length}": {"type": "integer"}}


async def test_without_llguidance_a_request_learns_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    source = ConstraintSource(ModelTokenizer(read_model_directory(DEMO_MODEL)))
    with pytest.raises(BadRequestError, match="pip install llguidance") as caught:
        await source.constraint(Request(id="r", model="m", text="x", sampling=sampling_of()), lambda: True)
    assert caught.value.param == GRAMMAR_PARAM
    await source.close()


async def test_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(constraint_source, "MAX_COMPILE_S", 0.05)
    monkeypatch.setattr(constraint_source, "compile_grammar", lambda *_: gate.wait(10))
    source = ConstraintSource(TOKENIZER)
    with pytest.raises(BadRequestError, match="could not be compiled within"):
        await source.constraint(Request(id="r", model="m", text="x", sampling=sampling_of()), lambda: True)
    gate.set()
    await source.close()


async def test_waiting_behind_other_grammars_is_not_the_grammars_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def compile_slowly(*_: object) -> None:
        begun.set()
        gate.wait(30)

    monkeypatch.setattr(constraint_source, "compile_grammar", compile_slowly)
    source = ConstraintSource(TOKENIZER)
    request = Request(id="r", model="m", text="x", sampling=sampling_of())
    first = asyncio.create_task(source.constraint(request, lambda: True))
    assert await asyncio.to_thread(begun.wait, 10)
    monkeypatch.setattr(constraint_source, "MAX_WAIT_S", 0.05)
    with pytest.raises(CompilerBusyError):
        await source.constraint(request, lambda: True)
    assert not first.done()
    first.cancel()
    gate.set()
    await source.close()


async def test_grammar_that_ends_its_compiler_is_refused_and_the_next_one_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A new compiler starts behind each one that has ended, which may take a busy machine long.
    monkeypatch.setattr("gpu_worker.consumer.constraint_source.MAX_WAIT_S", 60.0)
    source = ConstraintSource(TOKENIZER)
    names = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(90)}
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(50):
        deep = {"type": "array", "prefixItems": [deep], "items": False, "minItems": 1}
    hostile = [
        Grammar(kind="json_schema", source=json.dumps({"$defs": chain(990), "$ref": "#/$defs/d0"})),
        Grammar(kind="json_schema", source=json.dumps({"$defs": {**names, "d90": deep}, "$ref": "#/$defs/d0"})),
        # Intersections of complements, whose emptiness llguidance looks for without a limit.
        Grammar(kind="lark", source=f"start: A\nA: {ENDLESS_LEXEME}"),
    ]
    for grammar in hostile[:1] + hostile[2:]:
        with pytest.raises(BadRequestError) as caught:
            await source.constraint(request_with(grammar), lambda: True)
        assert (caught.value.param, caught.value.code) == (GRAMMAR_PARAM, "invalid_grammar")
    # Within the bounds, and deep: whatever the verdict, this process goes on.
    with contextlib.suppress(BadRequestError):
        await source.constraint(request_with(hostile[1]), lambda: True)
    assert await source.constraint(request_with(sampling_of().grammar), lambda: True) is not None
    await source.close()


async def test_nothing_is_compiled_here_that_the_limited_process_has_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, order = ConstraintSource(TOKENIZER), list[str]()
    check, here = source._checker.check, constraint_source.compile_grammar

    async def checked(*of: Any) -> None:
        await check(*of)
        order.append("checked")

    def compiled(*of: Any) -> Any:
        order.append("compiled")
        return here(*of)

    monkeypatch.setattr(source._checker, "check", checked)
    monkeypatch.setattr(constraint_source, "compile_grammar", compiled)
    for _ in range(2):
        assert await source.constraint(request_with(sampling_of().grammar), lambda: True) is not None
    assert order == ["checked", "compiled"]
    await source.close()


async def test_request_whose_grammar_waits_in_vain_again_and_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(*_: object) -> None:
        raise CheckerBusyError(is_own=True, retry_after_s=1.0)

    source = ConstraintSource(TOKENIZER)
    monkeypatch.setattr(source._checker, "check", busy)
    request = request_with(sampling_of().grammar)
    for _ in range(constraint_source.MAX_GIVEN_BACK - 1):
        with pytest.raises(CompilerBusyError):
            await source.constraint(request, lambda: True)
    with pytest.raises(BadRequestError, match="Send fewer") as caught:
        await source.constraint(request, lambda: True)
    assert caught.value.code == "too_many_grammars"
    # Another request begins at nought, and so does this one.
    with pytest.raises(CompilerBusyError):
        await source.constraint(msgspec.structs.replace(request, id="other"), lambda: True)
    with pytest.raises(CompilerBusyError):
        await source.constraint(request, lambda: True)
    await source.close()


async def test_request_that_waits_too_long_for_the_compiler_is_handed_back(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(*_: object, **__: object) -> None:
        raise CompilerBusyError

    monkeypatch.setattr(ConstraintSource, "constraint", busy)
    answer = await gateway.ask(sampling=sampling_of())
    assert answer.finish.reason == "handoff"


async def test_grammar_that_fails_on_the_way_is_the_clients_fault(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first mask takes too long, and the second is one too many.
    monkeypatch.setattr(grammar_budget, "USUAL_S", -1.0)
    monkeypatch.setattr(grammar_constraint, "_LONG_S", -1.0)
    answer = await gateway.ask(sampling=sampling_of())
    assert answer.finish.reason == "failed"
    assert answer.finish.error_param == GRAMMAR_PARAM
    assert answer.finish.error_code == "invalid_grammar"
    assert answer.finish.error.startswith("grammar: the grammar takes too long to follow")


@pytest.mark.parametrize(("content", "text"), [("Well, ", "yes"), ("<think>so", "hm</think>no")])
async def test_worker_says_whether_the_prompt_has_opened_the_reasoning_and_follows_that_grammar(
    worker: RunningWorker, gateway: TestGateway, monkeypatch: pytest.MonkeyPatch, content: str, text: str
) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_format", "thinking")
    grammar = Grammar(kind="lark", source='start: "yes"\n', in_reasoning='"hm</think>no"')
    messages = (ChatMessage(role="user", content="x"), ChatMessage(role="assistant", content=content))
    options = ChatOptions(continue_final_message=True)
    answer = await gateway.ask(text=None, messages=messages, chat=options, sampling=sampling_of(grammar))
    assert answer.text == text
    claim = next(delta for delta in answer.deltas if delta.prompt_tokens is not None)
    assert claim.in_reasoning is (text != "yes")
