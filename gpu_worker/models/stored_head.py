"""Whether a checkpoint's files hold a head: models that also see or hear say it in several places, or nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpu_worker.models.block_traits import TensorNames
from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.shard_files import INDEX_FILE, SINGLE_FILE
from gpu_worker.models.tensor_file import TensorFile

_HEAD = "lm_head."


def has_head(directory: Path, names: TensorNames) -> bool | None:
    """Return whether there is a tensor of the head; None where no file can be read, or none holds weights.

    Whoever reads the weights says what is wrong with a file.

    Args:
        directory: Of the files.
        names: Of the family's tensors.
    """
    stored = [names.own_name(name) for name in _stored_names(directory)]
    return any(name.startswith(_HEAD) for name in stored) if stored else None


def _stored_names(directory: Path) -> Iterable[str]:
    try:
        if (directory / SINGLE_FILE).exists():
            file = TensorFile(directory / SINGLE_FILE)
            file.close()
            return file.tensors
        if (directory / INDEX_FILE).exists():
            weight_map = JsonFile.read(directory / INDEX_FILE).nested("weight_map")
            return () if weight_map is None else weight_map.names()
    except CheckpointError:
        pass
    return ()
