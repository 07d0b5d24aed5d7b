"""LangChain's `ChatOpenAI` and `OpenAIEmbeddings`."""

from __future__ import annotations

from cells import CALLING, KEY, MODEL, NUM_SEEN, NUM_TURNS, PICTURE, PICTURE_URL, SCHEMA, SEEING, URL, check_person, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

TOOL = {"type": "function", "function": {"name": "person", "parameters": SCHEMA, "strict": True}}


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


def model(max_tokens: int = 8, **options: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_tokens=max_tokens, max_retries=0, timeout=120, **options
    )


def chat() -> None:
    answer = model().invoke("hello")
    assert answer.content
    assert 1 <= answer.usage_metadata["output_tokens"] <= 8


def stream() -> None:
    chunks = list(model(stream_usage=True).stream("hello"))
    assert "".join(chunk.content for chunk in chunks)
    assert 1 <= sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) <= 8


def json_schema() -> None:
    found = model(400).with_structured_output(Person, method="json_schema").invoke("somebody")
    assert isinstance(found, Person)


def tool_call() -> None:
    answer = model(400).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke("somebody")
    check_person(answer.tool_calls[0]["args"])


def streamed_tool_call() -> None:
    total = None
    for chunk in model(400).bind_tools([TOOL], tool_choice="person", parallel_tool_calls=False).stream("somebody"):
        total = chunk if total is None else total + chunk
    check_person(total.tool_calls[0]["args"])


def tool_loop() -> None:
    bound = model(200).bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    messages: list[object] = [HumanMessage("somebody")]
    for _ in range(NUM_TURNS):
        answer = bound.invoke(messages)
        [call] = answer.tool_calls
        check_person(call["args"])
        messages += [answer, ToolMessage("stored", tool_call_id=call["id"])]


def embeddings() -> None:
    found = OpenAIEmbeddings(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    assert len(found.embed_documents(["a", "b"])) == 2


def tool_not_offered() -> None:
    place = {"base_url": f"{CALLING.url}/v1", "api_key": CALLING.key, "model": CALLING.model}
    bound = ChatOpenAI(**place, max_tokens=50, max_retries=0).bind_tools([Person])
    messages: list[object] = [HumanMessage("somebody")]
    for _ in range(2):
        answer = bound.invoke(messages)
        [call] = answer.tool_calls
        assert (call["name"], call["args"]) == ("nobody", {"who": "me"})
        messages += [answer, ToolMessage("There is no such tool.", tool_call_id=call["id"], status="error")]


def response() -> None:
    assert model(use_responses_api=True).invoke("hello").text


def _looked(image: dict[str, object], **options: object) -> None:
    place = {"base_url": f"{SEEING.url}/v1", "api_key": SEEING.key, "model": SEEING.model, "max_tokens": 4}
    asked = HumanMessage([image, {"type": "text", "text": "Look"}])
    answer = ChatOpenAI(**place, max_retries=0, timeout=120, **options).invoke([asked])
    assert answer.usage_metadata["input_tokens"] == NUM_SEEN, answer.usage_metadata


def images() -> None:
    _looked({"type": "image_url", "image_url": {"url": PICTURE_URL}})
    _looked({"type": "image", "base64": PICTURE, "mime_type": "image/png"})


def streamed_images() -> None:
    place = {"base_url": f"{SEEING.url}/v1", "api_key": SEEING.key, "model": SEEING.model, "max_tokens": 4}
    asked = HumanMessage([{"type": "image_url", "image_url": {"url": PICTURE_URL}}, {"type": "text", "text": "Look"}])
    chunks = ChatOpenAI(**place, max_retries=0, timeout=120, stream_usage=True).stream([asked])
    counts = [chunk.usage_metadata["input_tokens"] for chunk in chunks if chunk.usage_metadata]
    assert counts == [NUM_SEEN], counts


def response_images() -> None:
    _looked({"type": "image", "base64": PICTURE, "mime_type": "image/png"}, use_responses_api=True)


run(
    {
        "chat": chat,
        "stream with usage": stream,
        "JSON schema": json_schema,
        "tool call": tool_call,
        "streamed tool call": streamed_tool_call,
        "loop of tool calls": tool_loop,
        "embeddings": embeddings,
        "Responses": response,
        "call of a tool that was not offered": tool_not_offered,
        "images": images,
        "images in Responses": response_images,
        "streamed images": streamed_images,
    }
)
