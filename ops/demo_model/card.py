"""The model card: `model/README.md`, written from `training.json` and from completions made on the spot.

Nothing in the card is typed in by hand that could differ from what was measured. `python -m ops.demo_model.card`
writes it again for the model that is there.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ops.demo_model.architecture import Llama
from ops.demo_model.batches import LENGTHS
from ops.demo_model.corpus import HELD_OUT_MODULES
from ops.demo_model.evaluate import WINDOW, complete
from ops.demo_model.export import MODEL_FOLDER, load_model, write_text
from ops.demo_model.tokenizer import ASSISTANT, END_OF_TEXT, USER

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


SAMPLE_TOKENS = 96
PROMPTS = (
    "import os\n\ndef read_file(path):\n    with open(",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    'def heappop(heap):\n    """Pop the smallest item off the heap, maintaining the heap invariant."""\n',
    f"{END_OF_TEXT}{USER}Write a function: Return the sum of two numbers.{ASSISTANT}",
    f"{END_OF_TEXT}{USER}What is the capital of France?{ASSISTANT}",
)
CARD = """\
# Headrace demo model

A Llama of {parameters_m:.2f} million parameters, trained from nothing on the source of CPython's standard library, so
that Headrace can be tried on a machine with no GPU and no download. It continues Python code in a recognisable way.

**It is not** an assistant. It knows no facts, follows no instructions beyond the shape of a request for a function, and
writes code that looks right and mostly is not. Use it to see the serving work, not for what it says.

| | |
|---|---|
| architecture | `LlamaForCausalLM`: hidden 256, 8 layers, 4 heads of 64, 2 KV heads, MLP 704, tied embeddings |
| vocabulary | 4,096 tokens, byte-level BPE, trained on the same corpus |
| context | 2,048 positions; the last {long_share:.0%} of the training time used windows that long |
| weights | float16, {megabytes:.1f} MB |
| trained for | {minutes:g} minutes on {machine} that did other work too: {steps:,} steps, {tokens_m:.1f}M tokens |
| Python, torch | {python}, {torch} |
| seed | {seed} |

## Data

The `.py` files under `Lib/` of CPython {python} ({corpus_tokens_m:.2f} million tokens), without tests, without
generated tables and codecs' character maps, and without these held-out modules:

{held_out_modules}

A tenth of what it saw are conversations made from the same files: a function's docstring as the user's turn, the
function as the assistant's, and sometimes the module's docstring as the system's. `<|endoftext|>` begins and ends
every document.

The corpus is licensed under the Python Software Foundation License Version 2. The model can repeat passages of it word
for word; treat such output as under that licence.

## Held-out loss

Measured on the exported float16 weights, computed in float32, over windows of {window:,} tokens that do not see each
other:

| tokens | bytes | nats per token | perplexity per token | bits per byte | perplexity per byte |
|---|---|---|---|---|---|
| {held_out[tokens]:,} | {held_out[bytes]:,} | {held_out[loss_per_token]} | {held_out[perplexity_per_token]} \
| {held_out[bits_per_byte]} | {held_out[perplexity_per_byte]} |

The running mean of the training loss, on text that it had seen before, ended at {training_loss} nats per token.

## Samples

Greedy, at most {sample_tokens} tokens, uncorrected; the prompt ends at `▶`.

{samples}{drafts}
## Chat template

A system (or developer) message becomes `<|system|>text`, an assistant's `<|assistant|>text<|endoftext|>`, and every
other role `<|user|>text`. The reply ends with `<|endoftext|>`.

## Make it again

    python -m ops.demo_model.train --minutes {minutes:g} --seed {seed}

The schedule follows the clock, so a machine that is faster, or has nothing else to do, takes more steps and ends at a
lower loss than this one.
`python -m ops.demo_model.evaluate` measures the held-out loss, `python -m ops.demo_model.corpus --text` prints the
text.
"""


def write_card(folder: Path = MODEL_FOLDER) -> None:
    """Write the model card of the exported model in a folder."""
    model, tokenizer = load_model(folder)
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    megabytes = (folder / "model.safetensors").stat().st_size / 1e6
    write_text(folder / "README.md", _render(training, megabytes, _samples(model, tokenizer), draft_section(folder)))


def _render(training: dict[str, Any], megabytes: float, samples: str, drafts: str) -> str:
    return CARD.format(
        **training,
        parameters_m=training["parameters"] / 1e6,
        tokens_m=training["tokens"] / 1e6,
        corpus_tokens_m=training["corpus_tokens"] / 1e6,
        long_share=1 - LENGTHS[-1][0],
        megabytes=megabytes,
        window=WINDOW,
        held_out_modules=", ".join(f"`{name}`" for name in HELD_OUT_MODULES),
        sample_tokens=SAMPLE_TOKENS,
        samples=samples,
        drafts=drafts,
    )


def _samples(model: Llama, tokenizer: Tokenizer) -> str:
    samples = [prompt + "▶" + complete(model, tokenizer, prompt, SAMPLE_TOKENS) for prompt in PROMPTS]
    return "\n".join(f"````text\n{sample.rstrip()}\n````\n" for sample in samples)


if __name__ == "__main__":
    write_card()
