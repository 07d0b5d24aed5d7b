"""`GET /props` and `POST /apply-template`."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.api.operation import Operation
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.api.schemas.bodies import TokenizeBody
from gateway.api.schemas.refusals import missing_parameter
from gateway.api.schemas.tokenizer import parse_tokenize
from gateway.llama_cpp.infill import InfillAnswer, InfillBody
from shared.tokenizer_calls import TemplateCall


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
        """Answer with these."""
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
                modalities={"vision": False, "audio": False},
            )
        )

    async def _apply_template(self, request: Request, principal: Principal) -> Response:
        model, call = await self._services.read_body(request, principal, parse_tokenize)
        if call.messages is None:
            raise missing_parameter("messages")
        reply = await self._services.ask_tokenizer(principal, model, msgspec.structs.replace(call, renders=True))
        return json_response(PromptAnswer(reply.text))


OPERATIONS = (
    Operation("post", "/apply-template", "Show the prompt of a conversation.", PromptAnswer, TokenizeBody),
    Operation("post", "/infill", "Fill in text before a suffix.", InfillAnswer, InfillBody, InfillAnswer),
    Operation("get", "/props", "Describe a model, as llama.cpp's server does.", PropsAnswer),
)
