"""Converts checkpoints by llama.cpp's own converter, in a process of its own: it brings its own `gguf` package.

Arguments: llama.cpp's sources, and a file with a list of model folder, target file, type and options, as JSON. Prints,
as JSON, what went wrong with which target. The vocabularies of the checkpoints are of no real model, which the
converter knows by what they make of a text; so it is told which one they are, and to take them as they are.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Those that delegate to a class that is chosen by the checkpoint, or whose vocabularies are not byte pairs.
_DELEGATES = ("Mistral3Model", "BertModel")

PUBLISHED = "published.json"
"""Holds fields of a checkpoint's `config.json` as published ones have them, where `transformers` reads others."""


NULLS = "nulls"
"""Names fields there that the converter wants to see as null: others that are null are left out."""


def main(sources: Path, jobs: Path) -> None:
    """Convert all."""
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import gguf
    import torch

    conversion: Any = importlib.import_module("conversion")
    logging.disable(logging.WARNING)
    types = {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16}
    base: Any = conversion.ModelBase
    failures: dict[str, str] = {}
    with torch.inference_mode():
        for model, target, kind, options in json.loads(jobs.read_text()):
            try:
                published = json.loads((Path(model) / PUBLISHED).read_text())
                fields = {**base.load_hparams(Path(model), False), **published}
                fields = {name: value for name, value in fields.items() if name not in published or value is not None}
                fields |= dict.fromkeys(fields.pop(NULLS, ()))
                name = conversion.get_model_architecture(fields, conversion.ModelType.TEXT)
                made_by = conversion.get_model_class(name)
                for text_model in _below(conversion.TextModel):
                    text_model.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
                    if text_model.__name__ not in _DELEGATES and "set_vocab" in vars(text_model):
                        text_model.set_vocab = lambda self: self._set_vocab_gpt2()
                    if "_is_tokenizer_xlmroberta" in vars(text_model):
                        text_model._is_tokenizer_xlmroberta = lambda self: False
                made_by(Path(model), types[kind], Path(target), hparams=fields, **options).write()
            except (Exception, SystemExit) as error:
                failures[target] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    sys.stdout.write(f"{json.dumps(failures)}\n")


def _below(kind: Any) -> Iterator[Any]:
    yield kind
    for child in kind.__subclasses__():
        yield from _below(child)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
