"""Writes a checkpoint of `make_model` in bfloat16 as GGUF, by llama.cpp's own converter, which brings its own package.

Arguments: llama.cpp's sources, model directory, target file. The vocabulary is numbered words: the benchmarks give
token ids, and the text of an answer must tell how many tokens it has.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def main(sources: Path, model_dir: Path, target: Path) -> None:
    """Convert."""
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import gguf
    import torch

    conversion: Any = importlib.import_module("conversion")
    fields = conversion.ModelBase.load_hparams(model_dir, False)
    family = conversion.get_model_class(conversion.get_model_architecture(fields, conversion.ModelType.TEXT))

    def set_vocab(model: Any) -> None:
        """Add words of one token each; the first three are the unknown word, and the beginning and end of a text."""
        writer, size, types = model.gguf_writer, fields["vocab_size"], gguf.TokenType
        words = (f"\N{LOWER ONE EIGHTH BLOCK}w{index}" for index in range(3, size))
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *words])
        writer.add_token_scores([0.0] * size)
        writer.add_token_types([types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.NORMAL] * (size - 3)])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)

    # It knows vocabularies by what they make of a text, and this one is of no published model.
    family.set_vocab = set_vocab
    # No layer that drafts.
    family.no_mtp = True
    with torch.inference_mode():
        family(model_dir, gguf.LlamaFileType.MOSTLY_BF16, target, hparams=fields).write()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
