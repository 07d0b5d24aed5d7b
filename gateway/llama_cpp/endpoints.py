"""`POST /infill`, `GET /props` and `POST /apply-template`.

`/infill` writes a text between a prefix and a suffix, for models that have tokens for it. Its body is that of a text
completion whose prompt and suffix have other names; the answer is llama.cpp's own.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.api.answer import Answer, EventAnswer
from gateway.api.endpoint import Asked, Endpoint, StreamParts
from gateway.api.operation import Operation
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.api.schemas.bodies import TokenizeBody
from gateway.api.schemas.checks import invalid_value, missing_parameter, unsupported_parameter
from gateway.api.schemas.decoding import decode_typed
from gateway.api.schemas.known_names import STRICT, BodyRules
from gateway.api.schemas.parsing import parse_completion, parse_tokenize
from gateway.errors import ApiError
from gateway.generation import Generation
from gateway.streams.dialect import COMMENT, Dialect, openai_error_event, server_sent_event
from shared.messages import IMAGES, Delta, Finish
from shared.tokenizer_calls import TemplateCall

# llama.cpp's streams end without a mark.
_DIALECT = Dialect(ApiError.body, openai_error_event, end_of_stream=b"", keep_alive=COMMENT)
_OWN_NAMES = ("input_prefix", "input_suffix", "input_extra", "prompt")
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


class InfillBody(Struct, kw_only=True):
    """What a body has beside the parameters of a completion."""

    input_prefix: str = ""
    input_suffix: str
    prompt: str = ""
    input_extra: list[Any] | None = None


_decoder = msgspec.json.Decoder(InfillBody)
_encode = msgspec.json.Encoder().encode


class InfillEndpoint(Endpoint):
    """Fills in. A model may be left out where there is only one."""

    path = "/infill"
    name = "infill"
    dialect = _DIALECT
    is_logged = True

    async def generation(self, body: bytes, principal: Principal, rules: BodyRules = STRICT) -> Generation:
        """Parse the body as a completion's."""
        completion = await self._bodies.read(principal.tenant, len(body), partial(_completion_fields, body))
        read = partial(parse_completion, _encode(completion), rules)
        generation = await self._bodies.read(principal.tenant, len(body), read)
        if generation.num_sequences != 1:
            raise invalid_value("n", "'n' and 'best_of' must be 1 here.")
        return generation

    def whole_answer(self, asked: Asked) -> Answer:
        """Return an answer as one object."""
        return _WholeInfill(asked)

    def streamed_answer(self, asked: Asked, parts: StreamParts) -> Answer:
        """Return an answer as events."""
        return _StreamedInfill(asked, parts)


def _completion_fields(body: bytes) -> dict[str, Raw]:
    """Return the fields of a completion that asks for the same."""
    own = decode_typed(_decoder, body)
    fields = _fields_decoder.decode(body)
    for name in _OWN_NAMES:
        fields.pop(name, None)
    if own.input_extra:
        raise unsupported_parameter("input_extra", instead="Put what belongs to it into 'input_prefix'.")
    if not own.input_suffix:
        raise invalid_value("input_suffix", "'input_suffix' must not be empty.")
    # Where llama.cpp's own clients set no limit, the text ends by itself.
    fields.setdefault("n_predict", Raw(b"-1"))
    prompt, suffix = own.input_prefix + own.prompt, own.input_suffix
    return fields | {"prompt": Raw(_encode(prompt)), "suffix": Raw(_encode(suffix))}


class InfillAnswer(Struct):
    """Text between a prefix and a suffix, or a piece of it; what follows `stop` is in the last piece alone."""

    index: int
    content: str
    stop: bool
    model: str
    stop_type: Literal["limit", "word", "eos"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET


def _told(model: str, text: str, finish: Finish | None) -> bytes:
    if finish is None:
        return _encode(InfillAnswer(0, text, False, model))
    stop, usage = finish.stop if isinstance(finish.stop, str) else "", finish.usage
    return _encode(
        InfillAnswer(
            0,
            text,
            True,
            model,
            stop_type="limit" if finish.reason == "length" else "word" if stop else "eos",
            stopping_word=stop,
            tokens_predicted=0 if usage is None else usage.completion_tokens,
            tokens_evaluated=0 if usage is None else usage.prompt_tokens,
            tokens_cached=0 if usage is None else usage.cached_tokens,
        )
    )


class _WholeInfill(Answer):
    def __init__(self, asked: Asked) -> None:
        super().__init__(asked.exchange, asked.generation, asked.head)
        self._model = asked.generation.model
        self._texts: list[str] = []
        self._finish: Finish | None = None
        self.sinks = [self]

    def deliver(self, delta: Delta) -> None:
        """Keep new text."""
        self._texts.append(delta.text)
        if delta.token_ids:
            self.note_output()
        if delta.finish is not None:
            self._finish = delta.finish
            self.finish_choice(0, delta.finish)

    def _complete(self) -> None:
        self._respond(_told(self._model, "".join(self._texts), self._finish))


class _StreamedInfill(EventAnswer):
    def __init__(self, asked: Asked, parts: StreamParts) -> None:
        super().__init__(asked.exchange, asked.generation, asked.head, parts.flusher, parts.limits, parts.now)
        self._model = asked.generation.model
        self.sinks = [self]

    def deliver(self, delta: Delta) -> None:
        """Send new text; the first output at once."""
        if self.done.done() or not (delta.text or delta.finish):
            return
        is_first = self.first_token_at is None
        self.note_output()
        event = server_sent_event(_told(self._model, delta.text, delta.finish))
        if delta.finish is not None:
            self._stream.send(event)
            self.finish_choice(0, delta.finish)
        elif is_first:
            self._stream.send_now(event)
        else:
            self._stream.send(event)

    def open(self) -> None:
        """Send an event without text."""
        self._stream.send_now(server_sent_event(_told(self._model, "", None)))

    def _complete(self) -> None:
        self._stream.end()


class PropsAnswer(Struct):
    """A model, as llama.cpp's server describes itself."""

    default_generation_settings: dict[str, int]
    total_slots: int
    model_alias: str
    chat_template: str
    build_info: str
    modalities: dict[str, bool]


class PromptAnswer(Struct, forbid_unknown_fields=True):
    """The text of a conversation's prompt."""

    prompt: str


class LlamaCppRoutes:
    """Answers for models of the fleet. `?model=` names one where there are several."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services

    def routes(self) -> list[KeyRoute]:
        """Return the routes."""
        return [
            KeyRoute("GET", "/props", self._props),
            KeyRoute("POST", "/apply-template", self._apply_template),
        ]

    async def _props(self, request: Request, principal: Principal) -> Response:
        model = self._services.model_or_only_one(principal, request.query_params.get("model"))
        reply = await self._services.ask_tokenizer(principal, model, TemplateCall())
        load = self._services.fleet.load(model)
        return json_response(
            PropsAnswer(
                default_generation_settings={"n_ctx": reply.max_model_len},
                total_slots=0 if load is None else load.running + load.free_slots,
                model_alias=model,
                chat_template=reply.text,
                build_info=f"headrace {version('headrace')}",
                modalities={"vision": load is not None and IMAGES in load.features, "audio": False},
            )
        )

    async def _apply_template(self, request: Request, principal: Principal) -> Response:
        model, call, images = await self._services.read_body(request, principal, parse_tokenize)
        if call.messages is None:
            raise missing_parameter("messages")
        call = msgspec.structs.replace(call, renders=True)
        reply = await self._services.ask_tokenizer(principal, model, call, images)
        return json_response(PromptAnswer(reply.text))


OPERATIONS = (
    Operation("post", "/apply-template", "Show the prompt of a conversation.", PromptAnswer, TokenizeBody),
    Operation("post", "/infill", "Fill in text before a suffix.", InfillAnswer, InfillBody, InfillAnswer),
    Operation("get", "/props", "Describe a model, as llama.cpp's server does.", PropsAnswer),
)
