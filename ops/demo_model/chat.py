"""The chat format: how turns are written, and turns made from the corpus so that the model has seen the format.

A user's turn is what a function's docstring says, the assistant's turn is the function. The system's turn, where
there is one, is the first line of the module's docstring. So the model learns that the reply to a request is code,
and to stop.
"""

import ast
import random
import textwrap
from collections.abc import Iterable, Iterator

from ops.demo_model.tokenizer import ASSISTANT, SYSTEM, USER

# Tools, calls and results stand in the text as in the models of the Hermes family. The corpus has none of them, so the
# model calls a tool only where a grammar makes it.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>Call functions as <tool_call>\n' }}"
    '{{ \'{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n<tools>\' }}'
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{% set arguments = call['function']['arguments'] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ arguments if arguments is string else arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{% endfor %}{{ eos_token }}"
    "{% elif message['role'] in ('system', 'developer') %}{{ '<|system|>' + message['content'] }}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% else %}{{ '<|user|>' + message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
REQUESTS = (
    "{summary}",
    "Write a function: {summary}",
    "Write a Python function named {name}. {summary}",
    "Write {header}",
    "Complete this code:\n\n{header}",
)
MAX_FUNCTION_CHARACTERS = 1_600

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def chat_documents(documents: Iterable[str], rng: random.Random) -> Iterator[str]:
    """Yield one conversation for each documented function of the corpus that is short enough to be a reply."""
    for document in documents:
        try:
            tree = ast.parse(document)
        except (SyntaxError, ValueError):
            continue
        lines = document.splitlines(keepends=True)
        system = _first_line(ast.get_docstring(tree))
        turns = [_turn(node, lines, rng) for node in ast.walk(tree) if isinstance(node, FunctionNode)]
        for turn in filter(None, turns):
            prefix = SYSTEM + system if system and rng.random() < 0.4 else ""
            yield prefix + turn


def _turn(node: FunctionNode, lines: list[str], rng: random.Random) -> str | None:
    summary = _first_line(ast.get_docstring(node))
    source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
    if not summary or len(source) > MAX_FUNCTION_CHARACTERS:
        return None
    header = source.partition(":\n")[0] + ":"
    request = rng.choice(REQUESTS).format(summary=summary, name=node.name, header=header)
    return f"{USER}{request}{ASSISTANT}{source}"


def _first_line(docstring: str | None) -> str:
    return docstring.strip().partition("\n")[0] if docstring else ""
