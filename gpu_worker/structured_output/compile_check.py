"""The process that compiles a worker's grammars before the worker does, each in a limited fork.

The gateway checks grammars too, but any client of NATS may publish a request. What one of these forks has compiled, and
followed for a few tokens of the model's own vocabulary, within its processor time, memory and stack, the worker can
compile in its own process.
"""

from __future__ import annotations

import sys

import msgspec

from gpu_worker.structured_output.compiled_grammar import compile_grammar
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from shared.grammar import Grammar
from shared.grammar.checker_process import run
from shared.limited_process import read_message, renew_processor_time

CPU_LIMIT_S = 0.5
"""For the check, the compilation and the first masks, which may take `MAX_WARM_UP_S` by themselves."""


def main() -> None:
    """Read the tokenizer from the standard input, and serve."""
    message = read_message(sys.stdin.fileno())
    if message is None:
        return
    tokenizer = GrammarTokenizer(msgspec.msgpack.decode(message[2], type=TokenizerSource))

    def check(grammar: Grammar) -> None:
        renew_processor_time(CPU_LIMIT_S)
        compile_grammar(grammar, tokenizer)

    run(check)


if __name__ == "__main__":
    main()
