"""Write calls as the models' chat templates do: an oracle that knows nothing of the descriptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Call = tuple[str, dict[str, Any]]


def _hermes(calls: list[Call]) -> str:
    objects = [json.dumps({"name": name, "arguments": each}, ensure_ascii=False) for name, each in calls]
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def _qwen_coder(calls: list[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        parameters = "".join(f"<parameter={key}>\n{_plain(each)}\n</parameter>\n" for key, each in arguments.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(blocks)


def _glm(calls: list[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in arguments.items())
        blocks.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(blocks)


def _minimax(calls: list[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        pairs = (f'<parameter name="{key}">{_plain(each)}</parameter>\n' for key, each in arguments.items())
        blocks.append(f'\n<invoke name="{name}">\n{"".join(pairs)}</invoke>')
    return f"<minimax:tool_call>{''.join(blocks)}\n</minimax:tool_call>"


def _lfm(calls: list[Call]) -> str:
    return f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>"


def _dsml(calls: list[Call]) -> str:
    blocks = []
    for name, arguments in calls:
        parameters = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(each, str)).lower()}">{_plain(each)}'
            "</｜DSML｜parameter>\n"
            for key, each in arguments.items()
        )
        blocks.append(f'\n<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>')
    return f"<｜DSML｜function_calls>{''.join(blocks)}\n</｜DSML｜function_calls>"


def _deepseek(head: str, middle: str, tail: str, between: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        blocks = (f"<｜tool▁call▁begin｜>{head}{n}{middle}{_json(a)}{tail}<｜tool▁call▁end｜>" for n, a in calls)
        return f"<｜tool▁calls▁begin｜>{between.join(blocks)}<｜tool▁calls▁end｜>"

    return write


def _kimi(calls: list[Call]) -> str:
    # The grammar writes the index 0 for every call.
    blocks = (
        f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{_json(a)}<|tool_call_end|>" for n, a in calls
    )
    return f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"


def _mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _mistral_list(calls: list[Call]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls], ensure_ascii=False)


def _llama(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)


def _pythonic(calls: list[Call]) -> str:
    def value(each: Any) -> str:
        return str(each) if isinstance(each, bool) else json.dumps(each, ensure_ascii=False)

    written = (f"{n}({', '.join(f'{k}={value(v)}' for k, v in a.items())})" for n, a in calls)
    return f"[{', '.join(written)}]"


def _gemma(opening: str, close: str, quote: str) -> Callable[[list[Call]], str]:
    def value(each: Any) -> str:
        return f"{quote}{each}{quote}" if isinstance(each, str) else json.dumps(each, ensure_ascii=False)

    def write(calls: list[Call]) -> str:
        members = [",".join(f"{key}:{value(each)}" for key, each in arguments.items()) for _, arguments in calls]
        return "".join(f"{opening}call:{n}{{{m}}}{close}" for (n, _), m in zip(calls, members, strict=True))

    return write


def _harmony(calls: list[Call]) -> str:
    ((name, arguments),) = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": _hermes,
    "hermes-thinking": _hermes,
    "qwen-coder": _qwen_coder,
    "qwen-coder-thinking": _qwen_coder,
    "glm": _glm,
    "deepseek-v3": _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    "deepseek-r1": _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    "deepseek-v3.1": _deepseek("", "<｜tool▁sep｜>", "", ""),
    "deepseek-v3.2": _dsml,
    "kimi": _kimi,
    "kimi-thinking": _kimi,
    "minimax": _minimax,
    "lfm": _lfm,
    "mistral": _mistral,
    "mistral-thinking": _mistral,
    "mistral-list": _mistral_list,
    "llama-json": _llama,
    "llama-pythonic": _pythonic,
    "gemma": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function-gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "harmony": _harmony,
}
# Families whose calls another one writes too, which also thinks.
_ALIKE = frozenset({"hermes", "qwen-coder", "kimi", "mistral", "deepseek-v3"})
WRITTEN = [pytest.param(name, marks=[pytest.mark.slow] if name in _ALIKE else []) for name in WRITERS]
ONE_CALL_ONLY = frozenset({"harmony"})
