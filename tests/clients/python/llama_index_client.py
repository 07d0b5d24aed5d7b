"""llama-index's `OpenAILike`."""

from __future__ import annotations

from cells import KEY, MODEL, URL, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(max_tokens: int = 8) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key=KEY,
        max_tokens=max_tokens,
        max_retries=0,
        timeout=120,
        is_chat_model=True,
        is_function_calling_model=True,
    )


def chat() -> None:
    assert model().chat([ChatMessage(role="user", content="hello")]).message.content


def stream() -> None:
    assert list(model().stream_chat([ChatMessage(role="user", content="hello")]))[-1].message.content


def add(a: int, b: int) -> int:
    return a + b


def tool_call() -> None:
    llm = model(400)
    answer = llm.chat_with_tools([FunctionTool.from_defaults(add)], user_msg="add", tool_required=True, strict=True)
    [call, *_] = llm.get_tool_calls_from_response(answer)
    assert isinstance(call.tool_kwargs["a"], int)


run({"chat": chat, "stream": stream, "tool call": tool_call})
