"""The chat template and the conversations that taught the model its format."""

import random

import pytest
from jinja2 import Template

from ops.demo_model.chat import CHAT_TEMPLATE, chat_documents

MODULE = '''"""Stacks and such."""

class Stack:
    def push(self, item):
        """Put an item on top.

        More words.
        """
        self.items.append(item)

    def undocumented(self):
        return 1
'''


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    text: str = Template(CHAT_TEMPLATE).render(
        messages=messages,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        add_generation_prompt=add_generation_prompt,
    )
    return text


def test_user_message_ends_where_the_assistant_begins() -> None:
    assert render([{"role": "user", "content": "Add."}]) == "<|endoftext|><|user|>Add.<|assistant|>"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_and_developer_messages_come_as_system_turns(role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Add."}]

    assert render(messages) == "<|endoftext|><|system|>Be brief.<|user|>Add.<|assistant|>"


def test_assistant_message_is_closed_by_the_end_token() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    assert render(messages, add_generation_prompt=False) == "<|endoftext|><|user|>a<|assistant|>b<|endoftext|>"


def test_documented_functions_become_conversations() -> None:
    [document] = chat_documents([MODULE], random.Random(0))

    request, _, reply = document.partition("<|assistant|>")
    assert "<|user|>" in request
    assert reply.startswith("def push(self, item):\n    ")
    assert reply.endswith("self.items.append(item)")


def test_all_request_forms_name_the_function_or_say_what_it_does() -> None:
    requests = {next(chat_documents([MODULE], random.Random(seed))).partition("<|assistant|>")[0] for seed in range(60)}

    assert len(requests) > 5
    assert all("push" in request or "Put an item on top." in request for request in requests)


def test_source_that_does_not_parse_yields_nothing() -> None:
    assert list(chat_documents(["def f(:\n"], random.Random(0))) == []
