"""Held-out loss of a network, and the command that measures the shipped one (`python -m ops.demo_model.evaluate`)."""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from ops.demo_model.architecture import Llama
from ops.demo_model.corpus import held_out_documents
from ops.demo_model.export import MODEL_FOLDER, load_model
from ops.demo_model.tokenizer import END_OF_TEXT_ID, encode_documents

WINDOW = 1024
SLICE_WINDOWS = 4
"""Windows of a quick measurement: what snapshots are judged by, and what the tests measure again."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A loss, summed over tokens, with what it was summed over."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def loss_per_token(self) -> float:
        """Return the mean loss in nats a token."""
        return self.nats / self.num_tokens

    @property
    def perplexity_per_token(self) -> float:
        """Return the perplexity a token."""
        return math.exp(self.loss_per_token)

    @property
    def bits_per_byte(self) -> float:
        """Return the mean loss in bits a byte, which does not depend on the vocabulary."""
        return self.nats / self.num_bytes / math.log(2)

    @property
    def perplexity_per_byte(self) -> float:
        """Return the perplexity a byte."""
        return math.exp(self.nats / self.num_bytes)


@torch.inference_mode()
def evaluate(model: Llama, tokenizer: Tokenizer, documents: list[str], max_windows: int | None = None) -> Evaluation:
    """Measure the loss on documents, each cut into windows of 1,024 tokens that do not see each other.

    Args:
        model: the network.
        tokenizer: its tokenizer.
        documents: texts; each begins after an end-of-text token and must be closed by one.
        max_windows: stop after this number of windows; the byte count then covers only these.
    """
    windows = [window for ids in encode_documents(tokenizer, documents) for window in _cut([END_OF_TEXT_ID, *ids])]
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for window in windows[:max_windows]:
        ids = torch.tensor([window])
        logits = model(ids[:, :-1]).float()
        nats += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        num_tokens += len(window) - 1
        num_bytes += sum(_num_bytes(tokenizer, token) for token in window[1:])
    return Evaluation(nats, num_tokens, num_bytes)


def _num_bytes(tokenizer: Tokenizer, token: int) -> int:
    # A byte-level vocabulary writes each byte as one character.
    return 0 if token == END_OF_TEXT_ID else len(tokenizer.id_to_token(token) or "")


def _cut(ids: list[int]) -> list[list[int]]:
    return [ids[start : start + WINDOW + 1] for start in range(0, len(ids) - 1, WINDOW)]


def describe(evaluation: Evaluation) -> dict[str, float | int]:
    """Return the figures under the names that `training.json` and the model card use."""
    return {
        "loss_per_token": round(evaluation.loss_per_token, 4),
        "perplexity_per_token": round(evaluation.perplexity_per_token, 3),
        "bits_per_byte": round(evaluation.bits_per_byte, 4),
        "perplexity_per_byte": round(evaluation.perplexity_per_byte, 4),
        "tokens": evaluation.num_tokens,
        "bytes": evaluation.num_bytes,
    }


def main() -> None:
    """Print the held-out figures of an exported model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="the folder of the model")
    model, tokenizer = load_model(parser.parse_args().model)
    figures = describe(evaluate(model, tokenizer, held_out_documents()))
    sys.stdout.write("".join(f"{name}: {value}\n" for name, value in figures.items()))


if __name__ == "__main__":
    main()


@torch.inference_mode()
def greedy_tokens(model: Llama, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """Return the most likely continuation, token by token, ending early at the end-of-text token."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids]))
        token = int(logits[0, -1].argmax())
        ids.append(token)
        if token == END_OF_TEXT_ID:
            break
    return ids[len(prompt_ids) :]


def complete(model: Llama, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    """Return the greedy completion of a prompt as text, without its end-of-text token."""
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    text: str = tokenizer.decode(greedy_tokens(model, prompt_ids, max_tokens), skip_special_tokens=True)
    return text
