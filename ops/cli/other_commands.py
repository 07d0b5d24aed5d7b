"""Commands of other servers, and which of ours does the same."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

_DOCTOR = "`headrace doctor` says what runs here, which models are served, and what is wrong."
_STOP = "Ctrl-C in its terminal stops `headrace up`; SIGTERM stops any process in order."
_UP = "Serve a model with `headrace up --model {model}`."
_RUN = "Serve a model with `headrace up --model {model}`, then talk to it with `headrace chat` in another terminal."
_PULL = "A model is downloaded when it is served for the first time: `headrace up --model {model}`."
_SETTINGS = "Settings are options and variables: `headrace up --help`, ops/docs/configuration.md."

# What is said, and the commands of which it is said.
_ROWS: tuple[tuple[str, str], ...] = (
    (_UP, "serve server launch launch-server start load deploy api-server"),
    (_RUN, "run"),
    (_PULL, "pull download fetch"),
    (_STOP, "stop down kill restart shutdown unload exit quit"),
    (_DOCTOR, "ps status ls list models show info check check-env collect-env env diagnose"),
    ("`headrace quantize` makes a smaller copy of a model.", "create convert export compress"),
    ("Did you mean `headrace keys`?", "key token api-key apikey"),
    ("Submit a file of OpenAI's Batch API with `headrace batch submit FILE --watch`.", "run-batch"),
    ("Continue a text with `headrace chat TEXT`.", "complete completion generate ask prompt"),
    (_SETTINGS, "config configure init settings"),
    ("The API does it: POST /v1/embeddings.", "embed embedding embeddings"),
)


def instead_of(words: Sequence[str]) -> str | None:
    """Return the advice for a command of another server; None if no server has it.

    Args:
        words: The command as it was typed, with what stood behind it; a model among it is named in the answer.
    """
    name = words[0].lower().replace("_", "-")
    for advice, names in _ROWS:
        if name in names.split():
            return advice.format(model=shlex.join(_model_and_options(words[1:])))
    return None


def every_command() -> Iterator[str]:
    """Yield the commands that are explained."""
    for _, names in _ROWS:
        yield from names.split()


def _model_and_options(words: Sequence[str]) -> list[str]:
    return list(words) if words and not words[0].startswith("-") else ["MODEL"]
