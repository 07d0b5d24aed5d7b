"""Incident class: template injection. A chat template is code that came with a model; messages are no code at all."""

from __future__ import annotations

import contextlib
import time

import pytest

from gpu_worker.text import template_sandbox
from gpu_worker.text.chat_template import ChatTemplate
from shared.errors import BadRequestError, ConfigError

PLAIN = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def render(source: str, *contents: str) -> str:
    messages = [{"role": "user", "content": content} for content in contents or ("hello",)]
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    "content",
    [
        "{{ 7 * 7 }}",
        "{% for i in range(9) %}x{% endfor %}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% raw %}{{ bos_token }}",
        "{# comment #}",
        "${7*7} #{7*7} <%= 7*7 %>",
    ],
)
def test_content_of_a_message_is_never_run(content: str) -> None:
    assert render(PLAIN, content) == f"user: {content}\n"


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__",
        "raise_exception.__globals__",
        "strftime_now.__globals__['datetime']",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "lipsum.__globals__['os']",
        "self._TemplateReference__context",
        "messages.append({'role': 'user', 'content': 'x'})",
        "messages[0].update({'content': 'x'})",
        "'{0.__class__.__mro__}'.format(messages)",
        "'{0.__class__}'.format_map({'0': messages})",
        "messages|attr('__class__')",
        "range(200000)|list|length",
        "namespace.__init__.__globals__",
        "joiner.__init__.__globals__",
        "dict.fromkeys.__self__.__mro__",
    ],
)
def test_template_reaches_nothing_but_its_messages(expression: str) -> None:
    try:
        text = render("{{ " + expression + " }}")
    except (BadRequestError, ConfigError):
        return
    # Jinja turns some forbidden attributes into nothing instead of an error.
    assert text == ""


@pytest.mark.parametrize("statement", ["include '/etc/passwd'", "import '/etc/passwd' as x", "extends '/etc/passwd'"])
def test_template_reads_no_files(statement: str) -> None:
    with pytest.raises((BadRequestError, ConfigError)):
        render("{% " + statement + " %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(9999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{{ 'x' * 1000000000000000 }}",
        "{{ 1000000000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%1000000000000000d' % 1 }}",
        "{{ '%1000000000000000d'|format(1) }}",
        "{{ 'x'|center(1000000000000000) }}",
        "{{ 'x'.center(1000000000000000) }}",
        "{{ 'x'.zfill(1000000000000000) }}",
        "{{ 'a\nb'|indent(1000000000000000) }}",
        "{{ '{:1000000000000000}'.format('x') }}",
        "{{ '{:{}}'.format('x', 1000000000000000) }}",
        "{{ '{:{}}'.format('x', '1000000000000000') }}",
        "{{ '{:{}}'.format(1, -1000000000000000) }}",
        "{{ '{:{}}'.format('x', 1e15) }}",
        "{{ '{:{w}}'.format('x', w='1000000000000000') }}",
        "{{ '{:{w}}'.format('x', w=1000000000000000) }}",
        "{{ '{:{0[1]}}'.format('x', [1, 1000000000000000]) }}",
        "{{ '{0:{1[0]}}'.format('x', [1000000000000000]) }}",
        "{{ '{a:1000000000000000}'.format_map({'a': 'x'}) }}",
        "{{ '{a:{b}}'.format_map({'a': 'x', 'b': 1000000000000000}) }}",
        "{{ '%(a)1000000000000000d'|format(a=1) }}",
        "{{ '%(a(b)c)1000000000000000d' % {'a(b)c': 1} }}",
        "{{ '%*d' % (1000000000000000, 1) }}",
        "{{ 'a\tb'.expandtabs(tabsize=1000000000000000) }}",
        "{{ [1]|batch(1000000000000000, 0)|list }}",
        "{{ [1]|tojson(indent=1000000000000000) }}",
        "{{ lipsum(1000000000000000) }}",
        "{% for a in 'ab' recursive %}{% if loop.depth == 1 %}{{ loop('x' * 2000000) }}{% endif %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    ],
)
def test_template_that_computes_for_ever_or_without_bound_ends(source: str) -> None:
    """Texts of a petabyte: one that is made before it is refused runs out of memory, and is refused for no reason."""
    started = time.process_time()
    with pytest.raises(BadRequestError, match=r"refuses these messages: (it takes|its|a text|the|maximum rec|'lip)"):
        render(source)
    assert time.process_time() - started < 10


@pytest.mark.parametrize("form", ["{:", "%(", "%", "{", "{::::", "%((", ":"])
def test_forms_are_looked_at_in_linear_time(form: str) -> None:
    started = time.process_time()
    with contextlib.suppress(BadRequestError):
        render("{% set x = '" + form[0] + "' ~ '" + form + "' * 100000 %}{{ x.format(1) ~ x % 1 ~ x|format(1) }}")
    with contextlib.suppress(BadRequestError):
        render("{% set x = '" + form + "' ~ '" + form[-1] + "' * 200000 %}{{ x % 1 }}{{ x.format(1) }}")
    assert time.process_time() - started < 5


def test_numbers_in_texts_are_no_widths() -> None:
    text = '{"a": 1234567, "b": "%99999"}'
    mapped, stars = "{{ '{a}'.format_map({'a': m}) }}", "{{ '%.*s' % (99, m) }}"
    for source in ("{{ m|indent }}", "{{ '%s'|format(m) }}", "{{ '{}'.format(m) }}", "{{ m.ljust(3) }}", mapped, stars):
        assert render("{% set m = messages[0].content %}" + source, text) == text


@pytest.mark.parametrize(
    "source",
    [
        # Long chains of work without a loop.
        "{% set x = 'ab' * 2000000 %}" + "{% set y = x|upper|lower %}" * 400,
        "{% set x = 'ab' * 2000000 %}{% set y = x ~ 'c' %}" + "{% if y in x ~ 'd' %}{% endif %}" * 400,
        "{% set x = 'ab' * 2000000 %}" + "{% if (x|upper) is eq('aba') %}{% endif %}" * 400,
        # And with one.
        "{% set x = 'ab' * 2000000 %}{% for i in range(99999) %}{% set y = x|upper %}{% endfor %}",
        "{% for i in range(99999) %}{% set y = messages|tojson|length * 0 %}{% endfor %}",
    ],
    ids=["filters", "comparisons", "tests", "loop", "json"],
)
def test_template_of_a_client_ends_however_it_spends_its_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CPU_S", 0.05)
    template = ChatTemplate(source, {}, is_trusted=False)
    started = time.thread_time()
    with pytest.raises(BadRequestError, match="s of computing"):
        template.render([{"content": "x" * 100_000}], add_generation_prompt=True)
    assert time.thread_time() - started < 3


def test_template_of_many_messages_has_steps_enough() -> None:
    text = render(PLAIN, *["hello"] * 4096)
    assert text.count("user: hello") == 4096


def test_steps_are_counted_for_each_rendering_apart() -> None:
    template = ChatTemplate("{% for a in range(60000) %}{% endfor %}ok", {})
    for _ in range(40):
        assert template.render([], add_generation_prompt=True) == "ok"


@pytest.mark.parametrize("is_trusted", [True, False])
@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{% for a in b %}" * 400 + "{% endfor %}" * 400,
        "{{ 1" + " + 1" * 3000 + " }}",
    ],
)
def test_template_that_is_nested_too_deeply_is_refused(source: str, is_trusted: bool) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(source, {}, is_trusted=is_trusted)
