"""The model's tokenizer: text and conversations to token ids, and back.

Text of `/v1/completions` is read as Hugging Face and vLLM read it: strings that spell special tokens become them, and
the tokenizer adds its own (such as a leading begin-of-sequence) when asked to. In a conversation only the template may
place special tokens. All that clients write (content, names, tools, arguments, variables) is encoded as ordinary text
where it spells one, so that no one can forge a turn; models whose turns are marked by plain text instead of special
tokens cannot be protected this way.

Prompts for a text between a prefix and a suffix, by the tokens that mark them in public models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tokenizers import Tokenizer

from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from gpu_worker.text.chat_template import ChatTemplate, conversation_text, load_chat_template
from gpu_worker.text.detokenizer import make_detokenizer
from gpu_worker.text.library import TokenizerError, library_errors, return_freed_memory
from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.output_text import OutputText
from gpu_worker.text.special_tokens import SpecialTokens, read_special_tokens
from gpu_worker.text.spelled_tokens import PartEncoder, SpelledTokens
from gpu_worker.text.token_table import TokenTable, build_table, with_special_tokens
from gpu_worker.text.tokenizer_bounds import (
    TextCutter,
    TokenizerBoundsError,
    check_matched,
    check_steps,
    check_vocabulary_sizes,
)
from shared.conversation import ChatMessage, ChatOptions, Conversation
from shared.errors import BadRequestError, ConfigError, PromptTooLongError
from shared.formats import detect_format, format_named
from shared.sampling import Sampling


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """What stands before the text that is wanted, and what behind it."""

    prefix: str
    suffix: str


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The tokens before prefix, suffix and output. Without `middle`, the suffix goes first and the output last."""

    prefix: int
    suffix: int
    middle: int | None

    def prompt(self, prefix_ids: list[int], suffix_ids: list[int]) -> list[int]:
        """Return the token ids of a prompt, without the tokens that begin every prompt."""
        if self.middle is None:
            return [self.suffix, *suffix_ids, self.prefix, *prefix_ids]
        return [self.prefix, *prefix_ids, self.suffix, *suffix_ids, self.middle]


# StarCoder and Granite; Qwen and CodeGemma; SantaCoder; DeepSeek; Code Llama; CodeGeeX; Codestral.
_NAMES = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("[PREFIX]", "[SUFFIX]", None),
)


def find_infill_tokens(token_id: Callable[[str], int | None]) -> InfillTokens | None:
    """Return the tokens of a vocabulary, in which `token_id` looks up names; None if it has none."""
    for prefix_name, suffix_name, middle_name in _NAMES:
        prefix, suffix = token_id(prefix_name), token_id(suffix_name)
        middle = None if middle_name is None else token_id(middle_name)
        if prefix is not None and suffix is not None and (middle is None) == (middle_name is None):
            return InfillTokens(prefix, suffix, middle)
    return None


_REPLACEMENT = "\ufffd"
_MIN_LONGEST_TOKEN = 32
# How much of a prompt's end says whether it has opened the model's reasoning.
_TAIL_CHARACTERS = 4096
_MAX_COMPILED_TEMPLATES = 8
_LONG_CHARACTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What the operator says about conversations.

    `chat_format` is that of answers, or `auto`; with `allows_templates`, requests may bring their own template.
    """

    chat_format: str = "auto"
    allows_templates: bool = False


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The tokens of a prompt; `in_reasoning` if it has opened the reasoning in which the answer begins."""

    token_ids: list[int]
    in_reasoning: bool = False


class ModelTokenizer:
    """A tokenizer and chat template. Methods may run in several threads at once.

    Attributes:
        chat_format: In which the model writes reasoning and calls of tools.
        vocab_size: Token ids are smaller than this.
        max_token_bytes: No token stands for more bytes of text.
    """

    def __init__(self, directory: ModelDirectory, chat: ChatSettings | None = None) -> None:
        content = directory.read_tokenizer()
        tokens = read_special_tokens(directory, content)
        self._tokenizer = _load(content, directory, tokens)
        self.vocab_size = directory.vocab_size
        self._bos_token_id = directory.bos_token_id
        self._eos_token_ids = directory.eos_token_ids
        self._table = build_table(self._tokenizer, content, directory.vocab_size)
        self.max_token_bytes = self._longest_token()
        self._infill = find_infill_tokens(self._tokenizer.token_to_id)
        self._load_templates(directory, tokens.texts, chat or ChatSettings())
        # Token id to text and bytes, of the tokens that were shown so far: at most one entry an id.
        self._shown: dict[int, tuple[str, bytes]] = {}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._spelled = SpelledTokens(self._special.values())
        self._parts = PartEncoder(lambda text, limit: self._encode(text, False, limit), self._special)

    def has_vocabulary_of(self, other: ModelTokenizer) -> bool:
        """Return True if token ids mean the same in both."""
        mine: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return mine == other._tokenizer.get_vocab(with_added_tokens=True)

    def tokens_from(self, first_id: int) -> list[tuple[str, int]]:
        """Return the tokens whose ids are not smaller than this, with their ids, in order."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        found = [(token, token_id) for token, token_id in vocabulary.items() if token_id >= first_id]
        return sorted(found, key=lambda entry: entry[1])

    @property
    def num_own_ids(self) -> int:
        """One more than the largest id of the vocabulary itself, without the tokens that were added to it."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)

    def encode_text(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text, the begin-of-sequence token for an empty one.

        Raises:
            BadRequestError: The text is empty and the model has no begin-of-sequence token, or it has more tokens.
        """
        token_ids = self._encode(text, add_special_tokens, max_tokens)
        if token_ids:
            return token_ids
        if self._bos_token_id is None:
            raise BadRequestError("The prompt is empty, and this model has no begin-of-sequence token.", "prompt")
        return [self._bos_token_id]

    def encode_infill(self, prompt: InfillPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the prompt for a text between two others; `BadRequestError` if the model has no tokens for that."""
        if self._infill is None:
            raise BadRequestError("This model cannot fill in text before a suffix. Leave 'suffix' out.", "suffix")
        prefix_ids, suffix_ids = (self._encode(text, False) for text in (prompt.prefix, prompt.suffix))
        beginning = self._encode("", add_special_tokens)
        return [*beginning, *self._infill.prompt(prefix_ids, suffix_ids)]

    def encode_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the runs of tokens that spell each word, with a space before it and without."""
        runs = [tuple(self._encode(space + word.lstrip(), False)) for word in words for space in ("", " ")]
        return tuple(dict.fromkeys(run for run in runs if run))

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of two texts, joined as the tokenizer's files say, cut to `max_tokens`."""
        with library_errors():
            if max_tokens is not None:
                return self._cutter.joined(first, second, max_tokens)
            encodings = self._tokenizer.encode_batch_fast([(first, second)])
        ids: list[int] = encodings[0].ids
        return ids

    def shortened(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Return the first tokens of a text that was encoded with those that the tokenizer adds, which are kept."""
        return self._cutter.shortened(token_ids, max_tokens)

    def without_last_tokens(self, text: str, num_tokens: int) -> str:
        """Return a text without its last `num_tokens` tokens."""
        with library_errors():
            return self._cutter.without_last_tokens(text, num_tokens)

    @cached_property
    def _cutter(self) -> TextCutter:
        return TextCutter(self._tokenizer, self._encode)

    @property
    def has_chat_template(self) -> bool:
        """Return True if conversations can be encoded."""
        return self._template is not None

    def has_chat_roles(self, *roles: str) -> bool:
        """Return True if the chat template names all of these roles."""
        return self._template is not None and all(map(self._template.has_text, roles))

    def encode_chat(
        self, messages: Sequence[ChatMessage], options: ChatOptions | None = None, max_tokens: int | None = None
    ) -> EncodedPrompt:
        """Return the tokens of a conversation, by the model's chat template or the request's own.

        Raises:
            BadRequestError: There is no chat template, it refuses the conversation, or a text has more tokens.
        """
        conversation = Conversation(tuple(messages), options or ChatOptions())
        template = self._template_of(conversation.options)
        shield = self._spelled.shield()
        text = conversation_text(template, conversation, shield)
        token_ids = self._parts.encode(text, shield.mark, max_tokens)
        if not token_ids:
            raise BadRequestError("The model's chat template makes an empty prompt of these messages.", "messages")
        return EncodedPrompt(token_ids, self._is_in_reasoning(conversation, text.replace(shield.mark, "")))

    def _is_in_reasoning(self, conversation: Conversation, text: str) -> bool:
        options = conversation.options
        name = self.chat_format if options.template is None else detect_format(options.template)
        chat_format = format_named(name)
        if not chat_format.has_reasoning:
            return False
        last = conversation.messages[-1] if conversation.messages and options.continue_final_message else None
        if last is not None and last.reasoning and not last.content:
            return True
        continued = "" if last is None else last.content
        return chat_format.starts_in_reasoning(text[-_TAIL_CHARACTERS - len(continued) :], continued)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        with library_errors():
            text: str = self._tokenizer.decode_batch([token_ids], skip_special_tokens=True)[0]
        return text

    def output_text(self, prompt_ids: Iterable[int], sampling: Sampling) -> OutputText:
        """Return the empty output of a sequence with this prompt."""
        skips = sampling.skip_special_tokens
        table = self._table if skips else self._table_with_special_tokens
        detokenizer = make_detokenizer(self._tokenizer, table, prompt_ids, skip_special_tokens=skips)
        return OutputText(detokenizer, sampling)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; none for a special token."""
        if self._table is not None:
            return self._table.raw[token_id]
        with library_errors():
            first, both = (self._tokenizer.decode([token_id] * count, skip_special_tokens=True) for count in (1, 2))
        # Decoders drop the space that the first token of a text begins with.
        return both.removeprefix(first).encode()

    def token_text(self, token_id: int) -> str:
        """Return a token's text for display: special tokens by name, bytes that are not a character as U+FFFD."""
        if token_id in self._special:
            return self._special[token_id]
        return self.token_bytes(token_id).decode(errors="replace")

    def shown_token(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text for display and its bytes; worked out once an id."""
        shown = self._shown.get(token_id)
        if shown is None:
            shown = self._shown[token_id] = (self.token_text(token_id), self.token_bytes(token_id))
        return shown

    @cached_property
    def _table_with_special_tokens(self) -> TokenTable | None:
        return None if self._table is None else with_special_tokens(self._table, self._special)

    @cached_property
    def grammar_tokenizer(self) -> GrammarTokenizer:
        """The tokenizer for grammars of the output; of a large vocabulary it takes a second to make.

        Raises `LlguidanceMissingError` or `UnsupportedTokenizerError` where it cannot be made.
        """
        return GrammarTokenizer(self.grammar_source())

    def grammar_source(self) -> TokenizerSource:
        """Return the source of a tokenizer for grammars; its JSON has megabytes."""
        num_tokens = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        return TokenizerSource(self._tokenizer.to_str(), num_tokens, self.vocab_size, frozenset(self._eos_token_ids))

    @cached_property
    def plain_token_ids(self) -> list[int]:
        """Ids of the tokens that are printable text by themselves."""
        return [token_id for token_id in range(self.vocab_size) if self._is_plain(token_id)]

    def _longest_token(self) -> int:
        """Return the bytes of the longest token, and no less than one of a tokenizer that merges what it drops."""
        if self._table is not None:
            return max(_MIN_LONGEST_TOKEN, *map(len, self._table.raw))
        return max(_MIN_LONGEST_TOKEN, *(len(text.encode()) for text in self._tokenizer.get_vocab()))

    def _is_plain(self, token_id: int) -> bool:
        text = self.token_text(token_id)
        is_printable = text.replace("\n", " ").isprintable() and _REPLACEMENT not in text
        return text != "" and is_printable and token_id not in self._special

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        # Unlike `encode`, the batch call releases the interpreter lock.
        with library_errors():
            encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        try:
            if max_tokens is not None and len(encodings[0]) > max_tokens:
                # No other thread runs while a list is made, of millions of ids for a tenth of a second.
                raise PromptTooLongError(len(encodings[0]), max_tokens)
            ids: list[int] = encodings[0].ids
        finally:
            del encodings
            if len(text) >= _LONG_CHARACTERS:
                return_freed_memory()
        return ids

    def _load_templates(self, directory: ModelDirectory, tokens: Mapping[str, str], chat: ChatSettings) -> None:
        self._template = load_chat_template(directory, "default", tokens)
        self._tools_template = load_chat_template(directory, "tool_use", tokens)
        self._allows_templates = chat.allows_templates
        shown = self._tools_template or self._template
        is_auto = chat.chat_format == "auto"
        self.chat_format = detect_format(None if shown is None else shown.source) if is_auto else chat.chat_format

        @lru_cache(_MAX_COMPILED_TEMPLATES)
        def compiled(source: str) -> ChatTemplate:
            return ChatTemplate(source, tokens, is_trusted=False)

        self._compiled = compiled

    def _template_of(self, options: ChatOptions) -> ChatTemplate:
        if options.template is not None:
            return self._compiled_template(options.template)
        template = self._tools_template if options.tools and self._tools_template else self._template
        if template is None:
            raise BadRequestError(
                "This model has no chat template. Use /v1/completions, or add chat_template.jinja to its directory.",
                "messages",
            )
        return template

    def _compiled_template(self, source: str) -> ChatTemplate:
        if not self._allows_templates:
            message = "'chat_template' is not allowed here. Leave it out; the operator may start workers with "
            raise BadRequestError(f"{message}--allow-chat-template.", "chat_template", "unsupported_parameter")
        try:
            return self._compiled(source)
        except Exception as error:  # a hostile one fails in many ways
            raise BadRequestError(f"'chat_template' cannot be used: {str(error)[:200]}", "chat_template") from None


def _load(content: bytes, directory: ModelDirectory, tokens: SpecialTokens) -> Tokenizer:
    try:
        check_steps(content)
        check_matched(tokens.contents)
        with library_errors():
            tokenizer = Tokenizer.from_buffer(content)
            if not directory.path.is_file():
                # A GGUF file's own list is complete.
                tokens.add_to(tokenizer)
        check_vocabulary_sizes(tokenizer.get_vocab(with_added_tokens=True), directory.vocab_size)
    except (TokenizerBoundsError, TokenizerError) as error:
        problem = f"the tokenizer of {directory.path} is not usable: {error}"
        raise ConfigError("HEADRACE_MODEL", problem) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
