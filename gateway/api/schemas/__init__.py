"""From a request body to a `Generation`, or to a 400 that names the field and the limit. Pure functions."""

from gateway.api.schemas.chat import parse_chat
from gateway.api.schemas.completion import parse_completion
from gateway.api.schemas.tokenizer import parse_detokenize, parse_tokenize

__all__ = ["parse_chat", "parse_completion", "parse_detokenize", "parse_tokenize"]
