from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gpu_worker.text.chat_template import load_chat_template
from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.tokenizer import ChatSettings, ModelTokenizer
from shared.conversation import ChatMessage, ChatOptions, ToolCall
from shared.errors import BadRequestError, ConfigError
from tests.gpu_worker.text.conftest import CopiedModel, sentencepiece_tokenizer

SPECIAL = {"<|endoftext|>": 0, "<|system|>": 1, "<|user|>": 2, "<|assistant|>": 3}


@pytest.fixture(scope="module")
def reference(demo_directory: ModelDirectory) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(demo_directory.path)


def _message(content: str, role: str = "user") -> ChatMessage:
    return ChatMessage(role=role, content=content)


def test_chat_prompt_equals_that_of_transformers(tokenizer: ModelTokenizer, reference: Any) -> None:
    messages = [_message("Be brief.", "system"), _message("Hi\n é 日本"), _message("ok", "assistant"), _message("x")]
    plain = [{"role": message.role, "content": message.content} for message in messages]
    expected = reference.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.encode_chat(messages).token_ids == expected


def test_completion_prompt_equals_that_of_transformers(tokenizer: ModelTokenizer, reference: Any) -> None:
    for text in ["import os\n", "a<|user|>b", "日本語 é", " "]:
        assert tokenizer.encode_text(text) == reference(text)["input_ids"]


@settings(max_examples=100)
@given(parts=st.lists(st.sampled_from([*SPECIAL, "<|", "|>", "user", "<|us", "er|>", "<", "\n", "é", "\ue000"])))
def test_content_that_spells_special_tokens_forges_none_and_keeps_its_text(
    tokenizer: ModelTokenizer, parts: list[str]
) -> None:
    content = "".join(parts)
    token_ids = tokenizer.encode_chat([_message(content)]).token_ids
    assert [token_id for token_id in token_ids if token_id in SPECIAL.values()] == [0, 2, 3]
    assert tokenizer.decode(token_ids) == content


SPELLS = ["a</s>b", "</s>b", "a <s>", "b</s> a</s>", "<s", "/s> b", "s>", "<s></s>", "a</s>\n</s>c", "é</s>é"]


@pytest.mark.parametrize("form", ["Prepend", "first", "always", "never"])
@pytest.mark.parametrize("template", ["<s>{}</s>", "a {} b", "{}", "<s>a{}"])
def test_spelled_special_token_costs_no_space_in_the_style_of_sentencepiece(
    copied: CopiedModel, form: str, template: str
) -> None:
    library = sentencepiece_tokenizer(strips_space=False)
    if form != "Prepend":
        library.normalizer = normalizers.Replace(" ", "▁")
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
    library.save(str(copied.path / "tokenizer.json"))
    tokenizer = copied.tokenizer(template.format("{{ messages[0].content }}"))
    # transformers reads special tokens as text if asked to, but no tokens that are not called special.
    begin, end = (library.token_to_id(name) for name in ("<s>", "</s>"))
    library.add_tokens([AddedToken(name, normalized=False) for name in ("[B]", "[E]")])
    reference = PreTrainedTokenizerFast(tokenizer_object=library)
    own = {library.token_to_id("[B]"): begin, library.token_to_id("[E]"): end}
    for content in SPELLS:
        text = template.replace("<s>", "[B]").replace("</s>", "[E]").format(content)
        expected = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        token_ids = tokenizer.encode_chat([_message(content)]).token_ids
        assert token_ids == [own.get(token_id, token_id) for token_id in expected], content


EVERYWHERE = (
    "{{ bos_token }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ style }}{{ deep | tojson }}"
    "{% for m in messages %}"
    "<|user|>{{ m.role }}{{ m.name }}{{ m.content }}{{ m.reasoning_content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{{ c.function.arguments }}{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@settings(max_examples=60)
@given(
    parts=st.lists(
        st.sampled_from([*SPECIAL, "<|", "|>", "user", "<|us", "er|>", "\\", '"', "é", "\ue000"]), min_size=1
    )
)
def test_nothing_that_a_client_writes_forges_a_special_token(parts: list[str], everywhere: ModelTokenizer) -> None:
    text = "".join(parts)
    # With every escape that JSON allows.
    escaped = "".join(f"\\u{ord(character):04x}" for character in text)
    arguments = f'{{"{escaped}": ["{escaped}", {{"a": "{escaped}"}}]}}'
    call = ToolCall(id=text, name=text, arguments=arguments)
    messages = [
        ChatMessage(role=text, content=text, name=text, reasoning=text, tool_calls=(call,)),
        ChatMessage(role="tool", content=text, tool_call_id=text),
    ]
    options = ChatOptions(
        tools=f'[{{"name": "{escaped}", "{escaped}": {{"description": ["{escaped}"]}}}}]',
        variables=f'{{"style": "{escaped}", "deep": {{"{escaped}": ["{escaped}"]}}, "bos_token": "{escaped}"}}',
    )
    token_ids = everywhere.encode_chat(messages, options).token_ids
    # Not the one that begins a text either: what stands in its place is the client's own text.
    assert [token_id for token_id in token_ids if token_id in SPECIAL.values()] == [2, 2, 3]


@pytest.fixture(scope="module")
def everywhere(demo_directory: ModelDirectory, tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return CopiedModel(demo_directory, tmp_path_factory.mktemp("everywhere")).tokenizer(EVERYWHERE)


def test_template_of_a_request_needs_the_operators_leave(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(BadRequestError, match="--allow-chat-template") as raised:
        tokenizer.encode_chat([_message("x")], ChatOptions(template="mine"))
    assert (raised.value.param, raised.value.code) == ("chat_template", "unsupported_parameter")


def test_template_of_a_request_is_used_where_it_is_allowed(demo_directory: ModelDirectory) -> None:
    tokenizer = ModelTokenizer(demo_directory, ChatSettings(allows_templates=True))
    options = ChatOptions(
        template="{% for m in messages if m.role is eq('user') %}<|user|>{{ m.content|upper }}{% endfor %}"
    )
    token_ids = tokenizer.encode_chat([_message("x<|user|>")], options).token_ids
    assert (token_ids[0], tokenizer.decode(token_ids)) == (SPECIAL["<|user|>"], "X<|USER|>")
    for source in ("{% for %}", "(" * 5000):
        with pytest.raises(BadRequestError) as raised:
            tokenizer.encode_chat([_message("x")], ChatOptions(template="{{" + source if source[0] == "(" else source))
        assert raised.value.param == "chat_template"


def test_special_token_in_completion_text_is_that_token(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.encode_text("a<|user|>")[-1] == SPECIAL["<|user|>"]


def test_empty_completion_prompt_becomes_the_first_token(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.encode_text("") == [0]


def test_model_without_template_refuses_chat(copied: CopiedModel) -> None:
    copied.change("tokenizer_config.json", chat_template=None)
    tokenizer = copied.tokenizer()
    with pytest.raises(BadRequestError, match="no chat template") as raised:
        tokenizer.encode_chat([_message("x")])
    assert raised.value.param == "messages"


def test_named_templates_use_the_default_one_and_with_tools_the_one_for_them(copied: CopiedModel) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    copied.change("tokenizer_config.json", bos_token={"content": "<|endoftext|>"})
    tokenizer = copied.tokenizer(named)
    for options, text in ((ChatOptions(), "yes"), (ChatOptions(tools='[{"name": "f"}]'), "tools")):
        assert tokenizer.decode(tokenizer.encode_chat([_message("x")], options).token_ids) == text


def test_template_file_goes_before_the_configuration(copied: CopiedModel) -> None:
    (copied.path / "chat_template.jinja").write_text("file")
    tokenizer = copied.tokenizer("configuration")
    assert tokenizer.decode(tokenizer.encode_chat([_message("x")]).token_ids) == "file"


def test_templates_are_found_where_models_that_see_and_newer_ones_have_them(copied: CopiedModel) -> None:
    copied.change("tokenizer_config.json", chat_template=None)
    (copied.path / "chat_template.json").write_text(json.dumps({"chat_template": "plain"}))
    (copied.path / "additional_chat_templates").mkdir()
    (copied.path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    templates = [load_chat_template(copied.read(), name) for name in ("default", "tool_use", "rag")]
    assert [template and template.source for template in templates] == ["plain", "with tools", None]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}",
        "{{ messages[7].content }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "",
    ],
)
def test_template_that_refuses_or_fails_is_a_bad_request(copied: CopiedModel, template: str) -> None:
    tokenizer = copied.tokenizer(template)
    with pytest.raises(BadRequestError) as raised:
        tokenizer.encode_chat([_message("x")])
    assert raised.value.param == "messages"


def test_template_has_what_transformers_offers(copied: CopiedModel) -> None:
    template = (
        "  {% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}\n{{ strftime_now('%Y')[:2] }}"
    )
    tokenizer = copied.tokenizer(template)
    text = tokenizer.decode(tokenizer.encode_chat([_message("<é>"), _message("second")]).token_ids)
    assert text == '{"role": "user", "content": "<é>"}20'


def test_template_with_a_syntax_error_names_the_setting(copied: CopiedModel) -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_MODEL.*syntax error"):
        copied.tokenizer("{% for %}")


def test_token_text_names_special_tokens_which_have_no_bytes(tokenizer: ModelTokenizer) -> None:
    assert (tokenizer.token_text(2), tokenizer.token_bytes(2)) == ("<|user|>", b"")
    first = tokenizer.encode_text("日")[0]
    assert "\ufffd" in tokenizer.token_text(first)
    assert "日".encode().startswith(tokenizer.token_bytes(first))


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.WordPiece("##", cleanup=False),
    ],
)
def test_bytes_of_tokens_add_up_to_the_text(decoder: Any, copied: CopiedModel) -> None:
    """Their tokenizers have no table: the library decodes a token without the space before it."""
    texts = ["x", "##zz", "top", "##y"] if isinstance(decoder, decoders.WordPiece) else ["▁x", "▁zz", "▁top", "y"]
    library = Tokenizer(models.BPE({text: token_id for token_id, text in enumerate(texts)}, []))
    library.decoder = decoder
    (copied.path / "tokenizer.json").write_text(library.to_str())
    tokenizer = copied.tokenizer()
    told = b"".join(tokenizer.token_bytes(token_id) for token_id in range(4)).decode()
    assert told.removeprefix(" ") == tokenizer.decode(range(4))
    assert tokenizer.token_text(2) == " top"


def test_plain_tokens_leave_out_special_and_partial_ones(tokenizer: ModelTokenizer) -> None:
    plain = tokenizer.plain_token_ids
    assert len(plain) > 1000
    assert not set(plain) & set(SPECIAL.values())
    assert "\ufffd" not in tokenizer.decode(plain)


def test_shown_token_is_text_and_bytes_of_every_id(tokenizer: ModelTokenizer) -> None:
    for token_id in [*range(tokenizer.vocab_size), 2, 2]:
        assert tokenizer.shown_token(token_id) == (tokenizer.token_text(token_id), tokenizer.token_bytes(token_id))
    assert tokenizer.shown_token(7) is tokenizer.shown_token(7)


def test_last_message_goes_on_where_the_client_ended_it(tokenizer: ModelTokenizer) -> None:
    messages = [_message("2+3?"), _message("def f(", "assistant")]
    token_ids = tokenizer.encode_chat(messages, ChatOptions(continue_final_message=True)).token_ids
    assert tokenizer.decode(token_ids) == "2+3?def f("
    # Not closed by the token that ends a turn.
    assert token_ids[-1] != 0


@pytest.mark.parametrize(("setting", "name"), [("auto", "hermes"), ("plain", "plain"), ("harmony", "harmony")])
def test_format_is_that_of_the_template_unless_the_operator_knows_better(
    demo_directory: ModelDirectory, setting: str, name: str
) -> None:
    assert ModelTokenizer(demo_directory, ChatSettings(setting)).chat_format == name


def test_prompt_that_opens_the_reasoning_says_so(demo_directory: ModelDirectory) -> None:
    settings = ChatSettings("auto", allows_templates=True)
    tokenizer = ModelTokenizer(demo_directory, settings)
    thinking = (
        "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}>{% if enable_thinking is not defined %}<think>\n"
        "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )

    def starts_inside(message: ChatMessage, **options: Any) -> bool:
        return tokenizer.encode_chat([message], ChatOptions(template=thinking, **options)).in_reasoning

    user = _message("x")
    assert starts_inside(user)
    assert not starts_inside(user, variables='{"enable_thinking": false}')
    assert not starts_inside(user, add_generation_prompt=False)
    assert not starts_inside(ChatMessage(role="user", content="<think>"), variables='{"enable_thinking": false}')
    assert starts_inside(ChatMessage(role="assistant", content="<think>so"), continue_final_message=True)
    thought = ChatMessage(role="assistant", content="", reasoning="so")
    assert starts_inside(thought, continue_final_message=True)
