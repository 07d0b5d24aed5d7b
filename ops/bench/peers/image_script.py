"""Prepares images as vLLM does for a model, in one thread, and prints how many in a second of processor time.

Arguments: a folder with torchvision, model directory, files. It runs in vLLM's own environment. Of what vLLM does with
an image, its decoder and its model's processor are counted, and neither hashes nor tokens.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any


def main(torchvision: str, model_dir: str, paths: list[str]) -> None:
    """Prepare each file once, behind one that pays for the start."""
    import torch

    torch.set_num_threads(1)
    library: Any = torch.library
    # The wheel on PyPI is built for GPUs: without them it cannot describe its operators, of which resizing uses none.
    library.register_fake = lambda *_, **__: lambda function: function
    sys.path.insert(0, torchvision)
    importlib.import_module("torchvision.transforms.v2.functional")
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.transformers_utils.processor import cached_get_image_processor

    media, processor = ImageMediaIO(), cached_get_image_processor(model_dir)
    assert not type(processor).__name__.endswith("Pil"), "vLLM prepares images by torchvision where that is installed"

    def prepare(data: bytes) -> None:
        processor(images=media.load_bytes(data).media, return_tensors="pt")

    files = [Path(path).read_bytes() for path in paths]
    prepare(files[0])
    began = time.process_time()
    for data in files:
        prepare(data)
    print(len(files) / (time.process_time() - began))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
