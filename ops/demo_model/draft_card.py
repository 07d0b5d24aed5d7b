"""The model card's section on the drafts that lie beside the model, written from their `training.json`."""

import json
from pathlib import Path
from typing import Any

DRAFTS = ("draft", "medusa", "eagle")
SECTION = """
## Drafts

Beside this folder lie drafts for speculative decoding: a smaller model, Medusa heads that share this model's vocabulary
matrix, and an EAGLE layer. They learned from what this model makes of {material_m:.2f}M tokens: pieces of its corpus,
some of which it went on from by itself for {own_m:.2f}M tokens. What they draft changes the speed, never an answer.

{table}

"Accepted up to token n" is the share of greedy drafts of which the first n tokens are what this model says, on the
first {answer_tokens} tokens of its greedy answers to pieces of the held-out modules. A smaller model's first token is
for the place behind all that are known; so are the others', which look at a hidden vector one token back. "Accepted"
is what the engine took of a draft, on average, in answering {prompts} other pieces of {prompt_tokens} tokens greedily
with at most {draft_tokens} draft tokens a step; Medusa's are a tree there, and EAGLE's may be fewer.

    headrace worker --model ops/demo_model/model --speculative eagle --draft-model ops/demo_model/eagle

`python -m ops.demo_model.drafts` makes them again.
"""


def draft_section(folder: Path) -> str:
    """Return the section for the drafts in folders beside `folder`; nothing where they are not all there."""
    files = [folder.parent / name / "training.json" for name in DRAFTS]
    if not all(file.is_file() for file in files):
        return ""
    drafts: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    first = drafts[0]
    return SECTION.format(
        **first["served"],
        table=_table(drafts),
        material_m=first["material_tokens"] / 1e6,
        own_m=first["own_tokens"] / 1e6,
    )


def _table(drafts: list[dict[str, Any]]) -> str:
    depth = max(len(draft["accepted_up_to"]) for draft in drafts)
    later = [f"{number}" for number in range(2, depth + 1)]
    rows = [_row("folder", "weights", "trained for", "accepted up to token 1", *later, "accepted")]
    rows.append(_row(*["---"] * (depth + 4)))
    for name, draft in zip(DRAFTS, drafts, strict=True):
        shares = [f"{share:.1%}" for share in draft["accepted_up_to"]]
        rows.append(
            _row(
                f"`{name}`",
                f"{draft['megabytes']} MB",
                f"{draft['minutes']:g} minutes, {draft['tokens'] / 1e6:.2f}M tokens",
                *shares,
                *[""] * (depth - len(shares)),
                f"{draft['served']['accepted_a_draft']:.2f}",
            )
        )
    return "\n".join(rows)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
