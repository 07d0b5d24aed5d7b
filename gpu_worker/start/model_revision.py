"""A fingerprint of what a worker serves, so that answers cached for other weights of the same name are not repeated.

Of a model from the hub the commit stands behind that of its files, which names every byte.
"""

from __future__ import annotations

from pathlib import Path

from gpu_worker.models.revision import model_revision
from gpu_worker.start.config import WorkerConfig
from shared.model_hub import hub_commit

_COMMIT_MARK = "@"
_COMMIT_DIGITS = 12


def served_revision(config: WorkerConfig) -> str:
    """Return the revision of what a worker with these settings serves; they name a model."""
    assert config.model is not None
    simulated = "" if config.simulate is None else "simulated"
    revision = model_revision(Path(config.model), config.dtype, config.kv_cache_dtype, simulated)
    commit = hub_commit(Path(config.model))
    return revision if commit is None else f"{revision}{_COMMIT_MARK}{commit[:_COMMIT_DIGITS]}"


def revision_difference(own: str, other: str) -> str | None:
    """Say in which way two revisions differ; None where they are the same."""
    if own == other:
        return None
    content, _, commit = own.partition(_COMMIT_MARK)
    other_content, _, other_commit = other.partition(_COMMIT_MARK)
    if content != other_content:
        return "other weights or another number format"
    if commit and other_commit:
        return "another commit at the hub"
    return "the same files as far as samples tell, but only one of the folders says which commit at the hub it is"
