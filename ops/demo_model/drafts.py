"""Train the demo model's drafts: a smaller model, Medusa heads and an EAGLE layer, each in a folder of its own.

`python -m ops.demo_model.drafts --minutes 25` writes the folders `draft/`, `medusa/` and `eagle/` anew, from the demo
model, the text that it was trained on, and what it writes itself. They are measured on the held-out modules. With
`--out` they go elsewhere, and the model's card stays as it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ops.demo_model.batches import CHAT_SHARE
from ops.demo_model.card import DRAFTS, write_card
from ops.demo_model.chat import chat_documents
from ops.demo_model.corpus import held_out_documents, training_documents
from ops.demo_model.draft_serving import serve_drafts
from ops.demo_model.export import MODEL_FOLDER, write_text
from ops.demo_model.tokenizer import END_OF_TEXT
from ops.train_draft.job import KINDS, TrainDraftJob, Training, train_on
from ops.train_draft.material import Material, MaterialPlan, prepare
from ops.train_draft.optimization import Length
from ops.train_draft.sizes import DraftShape

DRAFT_FOLDERS: Mapping[str, Path] = MappingProxyType(
    {kind: MODEL_FOLDER.parent / name for kind, name in zip(KINDS, DRAFTS, strict=True)}
)
# A file of weights has four megabytes at most: that is why Medusa's heads share the model's vocabulary matrix.
_SHAPE = DraftShape(hidden_size=192, num_layers=2, num_heads=3, head_layers=2, shares_head=True, num_steps=2)
NUM_TOKENS = 1_372_160
_OWN_SHARE = 0.48


def material_plan(folder: Path, seed: int, num_tokens: int) -> MaterialPlan:
    """Write the texts into a folder, and plan to learn from `num_tokens` of their tokens."""
    documents = list(training_documents())
    rng = random.Random(seed)
    chats = list(chat_documents(documents, rng))
    mixed = documents + rng.sample(chats, int(len(chats) * CHAT_SHARE))
    rng.shuffle(mixed)
    texts = {"corpus.txt": mixed, "held-out.txt": held_out_documents()}
    for name, parts in texts.items():
        (folder / name).write_text("".join(part + END_OF_TEXT for part in parts), encoding="utf-8")
    corpus, held_out = (folder / name for name in texts)
    return MaterialPlan(MODEL_FOLDER, (corpus,), (held_out,), num_tokens, _OWN_SHARE, 512, seed)


def record(training: Training, kind: str, folder: Path, material: Material, seed: int) -> dict[str, Any]:
    """Return what `training.json` says of the draft in a folder, after measuring its files in the engine."""
    return {
        "kind": kind,
        "seed": seed,
        "minutes": round(training.seconds / 60, 1),
        "steps": training.steps,
        "tokens": training.num_tokens,
        "material_tokens": material.training.token_ids.numel(),
        "own_tokens": material.num_own,
        "training_loss": round(training.last_loss, 4),
        "megabytes": round((folder / "model.safetensors").stat().st_size / 1e6, 2),
        "machine": f"{torch.get_num_threads()} threads of a CPU",
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "accepted_up_to": [round(share, 3) for share in training.acceptance.by_position],
        "num_drafts": training.acceptance.num_drafts,
        "served": serve_drafts(kind, folder),
    }


def train_all(parent: Path, length: Length, num_tokens: int, seed: int) -> None:
    """Train the three drafts on the same material, one after another, each in its folder of `parent`."""
    with tempfile.TemporaryDirectory(prefix="headrace-drafts-") as folder:
        plan = material_plan(Path(folder), seed, num_tokens)
        material = prepare(plan, _tell)
        for kind, shipped in DRAFT_FOLDERS.items():
            out = parent / shipped.name
            training = train_on(material, TrainDraftJob(kind, out, length, plan, _SHAPE), _tell)
            found = record(training, kind, out, material, seed)
            write_text(out / "training.json", json.dumps(found, indent=2) + "\n")
            print(f"\n{kind}: {found}", file=sys.stderr)


def _tell(stage: str, done: int, total: int, note: str = "") -> None:
    print(f"\r{stage} {done / total:.1%} {note}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Train as the command line says, and write the model card again where the drafts lie beside the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="time to train each draft for")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="tokens to learn from")
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER.parent, help="folder for the three folders")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data")
    arguments = parser.parse_args()
    if arguments.minutes <= 0:
        parser.error("--minutes must be more than 0")
    train_all(arguments.out, Length(None, arguments.minutes * 60), arguments.tokens, arguments.seed)
    if arguments.out.resolve() == MODEL_FOLDER.parent:
        write_card()


if __name__ == "__main__":
    main()
