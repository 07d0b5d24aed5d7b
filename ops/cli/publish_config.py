"""The settings of `headrace publish`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ops.stack.config import DEFAULT_STATE_DIR
from shared.config import setting
from shared.nats_files import NatsFiles


@dataclass(frozen=True, slots=True)
class PublishConfig(NatsFiles):
    """What to publish, where, and whether to wait."""

    nats_url: str | None = setting(None, "NATS servers; found through the state directory if not given.")
    nats_user: str | None = setting(None, "NATS user of the batch role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")
    file: Path | None = setting(
        None, "JSON Lines file with one request a line, ours or of OpenAI's Batch API; `-` reads standard input."
    )
    model_name: str | None = setting(None, "Name of the model, for requests that name none.", alias="--model")
    tenant: str = setting("default", "Whose requests these are, for requests that do not say.")
    max_tokens: int = setting(64, "Tokens to generate at most, for requests that do not say.", minimum=1)
    temperature: float = setting(1.0, "Temperature, for requests that do not say.", minimum=0, maximum=2)
    seed: int = setting(0, "Seed, for requests that do not say.", minimum=-(2**63), maximum=2**63 - 1)
    queue_unserved: bool = setting(False, "Publish jobs for models that no worker serves now too: they wait for one.")
    wait: bool = setting(False, "Wait for the results and print them.")
    timeout_s: float = setting(3600.0, "How long to wait for the results.", minimum=0.1)
