"""The page `ops/docs/other-options.md`, made of the table that the command line answers from.

`python -m ops.docs_site.other_options` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ops.cli.other_servers.options import SERVERS
from ops.cli.other_servers.synonyms import ROWS as SYNONYMS

_HEAD = """\
# Options of other servers

Every option that people know from vLLM, SGLang, llama.cpp, text-generation-inference (TGI) or Ollama and that has
another name here, or none, with what to do instead. Whoever types one is told the same. An option that several of them
have is listed with the first. What has the same name and meaning here is not listed: [configuration](configuration.md)
has it. [Coming from vLLM, SGLang and others](coming-from.md) says what else differs.
"""
_ENDING = """\
This page is made of the command line's own table: `python -m ops.docs_site.other_options > ops/docs/other-options.md`.
"""
_TITLES = {
    "vLLM": "Of vLLM",
    "SGLang": "Of SGLang",
    "llama.cpp": "Of llama.cpp",
    "TGI": "Of TGI",
    "Ollama": "Of Ollama",
}


def page() -> str:
    """Return the page."""
    titled = [(_TITLES[owner], rows) for owner, rows in SERVERS]
    return "\n".join([_HEAD, *_sections([*titled, ("What else people type", SYNONYMS)]), _ENDING])


def _sections(titled: list[tuple[str, tuple[tuple[str, str], ...]]]) -> Iterator[str]:
    for title, rows in titled:
        yield f"## {title}\n\n| option | here |\n|---|---|"
        for advice, names in rows:
            shown = ", ".join(f"`{name}`" for name in names.split())
            yield f"| {shown} | {_with_code(advice)} |"
        yield ""


def _with_code(advice: str) -> str:
    """Return advice for a terminal with the names of options set as code, as they stand in pages."""
    words = []
    is_code = False
    for word in advice.split(" "):
        name = word.rstrip(",;:")
        words.append(f"`{name}`{word[len(name) :]}" if name.startswith("--") and not is_code else word)
        is_code ^= word.count("`") % 2 == 1
    return " ".join(words)


if __name__ == "__main__":
    print(page(), end="")
