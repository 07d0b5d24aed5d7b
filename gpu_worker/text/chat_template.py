"""Conversations to prompts, by the model's own Jinja template in a sandbox.

The template is code that came with the model. It runs without access to files and attributes of Python objects, takes
a bounded number of steps, and its output is bounded. What a template refuses (`raise_exception`) and what it cannot
digest is the client's bad request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from gpu_worker.models.json_file import is_inside, read_small_file
from gpu_worker.text.model_directory import ModelDirectory, read_json
from gpu_worker.text.spelled_tokens import Shield, new_mark
from gpu_worker.text.template_messages import CallArguments, TemplateNeeds, template_messages, text_parts
from gpu_worker.text.template_sandbox import TemplateSandbox, check_widths
from shared.conversation import Conversation
from shared.errors import BadRequestError, ConfigError

MAX_RENDERED_CHARACTERS = 16 << 20
# Ten times what the longest ones have. Compiled, a template takes some hundred times its size.
MAX_SOURCE_CHARACTERS = 1 << 20

# A template that looks at the types of a content's parts, and a text that none changes or has itself.
_READS_PARTS = re.compile(r"['\".]type\b")
_PROBE, _OTHER_PROBE = "headrace 7f3a", "headrace 7f3b"
_PART_ROLES = ("system", "developer", "user", "assistant", "tool")
# A list that was written as it is.
_SHOWS_PARTS = re.compile(r"['\"]type['\"]:\s*['\"]text")


class ChatTemplate:
    """A compiled template: its `source`, and what it `needs` of its messages."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, is_trusted: bool = True) -> None:
        """Compile `source`, maybe a request's; `ConfigError` if it is too long or has a syntax error."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            problem = f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are read"
            raise ConfigError("HEADRACE_MODEL", problem)
        self.source = source
        self.needs = TemplateNeeds.of(source)
        extensions = [_GenerationBlock, loopcontrols]
        environment = TemplateSandbox(is_trusted, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._environment = environment
        try:
            self._template = environment.from_string(source)
            self._texts = frozenset(node.value for node in environment.parse(source).find_all(nodes.Const))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError("HEADRACE_MODEL", f"the chat template has a syntax error: {error}") from error
        # What Python itself cannot compile of what Jinja has made of it.
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ConfigError("HEADRACE_MODEL", f"the chat template is nested too deeply: {error}") from error
        self._special_tokens = dict(special_tokens)
        if is_trusted and self.needs.has_null_content and not self._takes_call(None) and self._takes_call(""):
            # It looks whether something else is none.
            self.needs = replace(self.needs, has_null_content=False)
        if is_trusted and _READS_PARTS.search(source):
            has_parts = not self._shows(_PROBE) and self._shows(text_parts(_PROBE))
            part_roles = frozenset(filter(self._shows_parts, _PART_ROLES))
            self.needs = replace(self.needs, has_parts=has_parts, part_roles=part_roles)

    def _shows(self, content: object) -> bool:
        return _PROBE in self._rendered([{"role": "user", "content": content}])

    def _shows_parts(self, role: str) -> bool:
        content = text_parts(_PROBE, _OTHER_PROBE)
        conversation = {
            "assistant": [_user(), {"role": role, "content": content}, _user()],
            "tool": [_user(), _called(""), _result(content)],
            "user": [{"role": role, "content": content}],
        }
        prompt = self._rendered(conversation.get(role, [{"role": role, "content": content}, _user()]))
        return _PROBE in prompt and _OTHER_PROBE in prompt and not _SHOWS_PARTS.search(prompt)

    def _takes_call(self, content: str | None) -> bool:
        return self._rendered([_user(), _called(content), _result("x")]) != ""

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.render(messages, add_generation_prompt=True)
        except BadRequestError:
            return ""

    def has_text(self, text: str) -> bool:
        """Return True if the template's own code names this text, as it names a role that it knows."""
        return text in self._texts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt of a conversation; `BadRequestError` if the template refuses or fails."""
        parts: list[str] = []
        size = 0
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, "tools": tools}
        # As in `transformers`, variables take the place of special tokens.
        values = {"documents": None, **self._special_tokens, **(variables or {}), **given}
        try:
            with self._environment.rendering():
                for part in self._template.generate(values):
                    parts.append(part)
                    size += len(part)
                    if size > MAX_RENDERED_CHARACTERS:
                        problem = f"its text would be longer than {MAX_RENDERED_CHARACTERS} characters"
                        raise jinja2.TemplateError(problem)
        except Exception as error:
            raise BadRequestError(f"The model's chat template refuses these messages: {error}", "messages") from error
        return "".join(parts)


def _user() -> dict[str, Any]:
    return {"role": "user", "content": "x"}


def _called(content: str | None) -> dict[str, Any]:
    function = {"name": "f", "arguments": CallArguments({"a": 1}, '{"a": 1}')}
    calls = [{"id": "abcdefgh1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(content: object) -> dict[str, Any]:
    return {"role": "tool", "content": content, "name": "f", "tool_call_id": "abcdefgh1"}


def load_chat_template(
    directory: ModelDirectory, name: str = "default", special_tokens: Mapping[str, str] | None = None
) -> ChatTemplate | None:
    """Return the model's chat template of this name, or None when it has none; `ConfigError` if it cannot be used.

    The first of: `chat_template.jinja`, `tokenizer_config.json` (a string, or a list of named ones: `default`,
    `tool_use`), a file of its own, `chat_template.json`.
    """
    source = _template_source(directory, name)
    return None if source is None else ChatTemplate(source, special_tokens or {})


def _template_source(directory: ModelDirectory, name: str) -> str | None:
    source: Any = directory.tokenizer_config.get("chat_template")
    named = directory.path / "additional_chat_templates" / f"{name}.jinja"
    file = directory.path / "chat_template.jinja"
    if name != "default" and named.is_file():
        return _text_of(named, directory.path)
    if file.is_file():
        source = _text_of(file, directory.path)
    elif source is None:
        source = read_json(directory.path / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        # Entries of other types are not named templates.
        entries = [entry for entry in source if isinstance(entry, dict)]
        source = next((entry.get("template") for entry in reversed(entries) if entry.get("name") == name), None)
    elif name != "default":
        return None
    return source if isinstance(source, str) else None


def _text_of(file: Path, directory: Path) -> str:
    try:
        if not is_inside(file, directory):
            # Clients are shown templates: a model could otherwise tell them whatever the worker may read.
            raise ConfigError("HEADRACE_MODEL", f"{file} is a link out of the model's directory; copy the file there")
        return read_small_file(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("HEADRACE_MODEL", f"{file} cannot be read: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return JSON without Jinja's HTML escaping, as `transformers` does."""
    check_widths([indent])
    allowed = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _GenerationBlock(Extension):
    """Accepts `{% generation %}`, which marks text for training, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body's nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def conversation_text(template: ChatTemplate, conversation: Conversation, shield: Shield) -> str:
    """Return the prompt's text, with the shield's marks in it; `BadRequestError` if the template refuses."""
    options = conversation.options
    mark = new_mark()
    # As in transformers, the space shows whether the template trims contents: the continued one is trimmed then too.
    last_end = f"{mark} " if options.continue_final_message else ""
    try:
        tools = _decoded(options.tools, list[Any], "tools", shield)
        variables = _decoded(options.variables, dict[str, Any], "chat_template_kwargs", shield)
        messages = template_messages(conversation.messages, template.needs, shield, last_end)
    except RecursionError:
        raise BadRequestError("Tools, arguments or variables are nested too deeply.", "messages") from None
    render = partial(
        template.render,
        messages,
        add_generation_prompt=options.add_generation_prompt and not last_end,
        variables=variables,
    )
    try:
        text = render(tools=tools)
    except BadRequestError:
        # Some templates, gpt-oss's among them, add every description to a text, also one that is missing.
        if all(map(_has_description, tools or ())):
            raise
        text = render(tools=[_described(tool) for tool in tools])
    if not last_end:
        return text
    end = text.rfind(mark)
    if end < 0:
        message = "The model's chat template leaves out the last message, so that it cannot be continued."
        raise BadRequestError(message, "continue_final_message")
    return text[:end] if text.startswith(last_end, end) else text[:end].rstrip()


def _has_description(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return not isinstance(function, dict) or "description" in function


def _described(tool: Any) -> Any:
    return tool if _has_description(tool) else tool | {"function": {"description": "", **tool["function"]}}


def _decoded(text: str | None, kind: type[Any], param: str, shield: Shield) -> Any:
    if text is None:
        return None
    try:
        return shield.value(msgspec.json.decode(text, type=kind)) or None
    except msgspec.DecodeError as error:
        raise BadRequestError(f"{param} is not the JSON that it should be: {error}", param) from None
