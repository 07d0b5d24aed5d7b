"""The special tokens that a GGUF file names."""

from __future__ import annotations

from gpu_worker.quantization.gguf.metadata import Metadata

TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"
CONTROL = 3
"""The type of special tokens."""

_END_IDS = ("eos", "eot", "eom")
# Models end a turn with one token and a text with another, whereas most files name only one of the two as their end.
_ENDS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"),
        # Llama 4; Gemma 4, which waits for the results of tools; Solar Open; MiniMax M2.
        *("<|eot|>", "<|eom|>", "<turn|>", "<|tool_response>", "<|flush|>", "<|calls|>", "[e~["),
    }
)
# GLM ends a turn with the token that begins the next, of a user or of a tool.
_GLM_MARK, _GLM_ENDS = "[gMASK]", frozenset({"<|user|>", "<|observation|>"})
# gpt-oss ends each message of an answer with the token that ends Phi's turns, and the answer with others.
_PHI_ENDS, _HARMONY_ENDS = frozenset({"<|end|>"}), frozenset({"<|return|>", "<|call|>"})


def token_id(metadata: Metadata, name: str) -> int | None:
    """Return the id of the token with a role such as `bos`, or None; `GGUFError` if it is not a token's."""
    field = f"tokenizer.ggml.{name}_token_id"
    if field not in metadata:
        return None
    return metadata.integer(field, minimum=0, maximum=len(metadata.texts(TOKENS)) - 1)


def end_token_ids(metadata: Metadata) -> frozenset[int]:
    """Return the tokens that end a sequence: those that the file names, and special ones known by their spelling."""
    tokens = metadata.texts(TOKENS)
    named = {token_id(metadata, name) for name in _END_IDS} - {None}
    spelled: set[int] = set()
    if TOKEN_TYPES in metadata:
        types = metadata.numbers(TOKEN_TYPES, len(tokens))
        ends = _ENDS | (_HARMONY_ENDS if "<|return|>" in tokens else _PHI_ENDS)
        if _GLM_MARK in tokens:
            ends |= _GLM_ENDS
        spelled = {index for index, token in enumerate(tokens) if token in ends and types[index] == CONTROL}
    return frozenset(index for index in named | spelled if index is not None)
