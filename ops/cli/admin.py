"""A connection to NATS with an administrator's credentials, for as long as a command runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ops.cli.running_system import tell
from ops.stack.config import AUDIT_FILE_NAME, DEFAULT_STATE_DIR
from ops.stack.console import told_of_nats
from shared.audit import AUDIT_HELP
from shared.config import setting
from shared.nats_files import NatsFiles

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext


@dataclass(frozen=True, slots=True)
class AdminAccess(NatsFiles):
    """How an administrator logs in."""

    nats_user: str | None = setting(None, "NATS user of the admin role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)


@dataclass(frozen=True, slots=True)
class AuditedAccess(AdminAccess):
    """How an administrator logs in whose actions are written down, and on which system."""

    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")
    audit_file: Path | None = setting(None, f"{AUDIT_HELP} In the state directory if not given.")

    @property
    def audit_log(self) -> Path:
        """Where actions are written down: what belongs to one system stays in one place."""
        return self.audit_file or self.state_dir / AUDIT_FILE_NAME


@dataclass(frozen=True, slots=True)
class QueueAccess(AuditedAccess):
    """How an administrator reaches the queues."""

    nats_url: str | None = setting(None, "NATS servers; found through the state directory if not given.")
    timeout_s: float = setting(10.0, "How long NATS may take to appear.", minimum=0.1)


@asynccontextmanager
async def admin_client(url: str, name: str, access: AdminAccess, timeout_s: float) -> AsyncIterator[Client]:
    """Connect as `name`, waiting `timeout_s` for NATS to appear, and disconnect when the block ends.

    Who waits longer than a moment is told what for.

    Raises:
        DependencyError: NATS does not appear, or refuses us.
    """
    from shared.nats_connection import connect

    with told_of_nats(url, timeout_s, tell):
        client = await connect(
            url,
            role="admin",
            name=name,
            user=access.nats_user,
            password=access.nats_password,
            files=access,
            timeout_s=timeout_s,
        )
    try:
        yield client
    finally:
        await client.close()


async def delete_message(js: JetStreamContext, stream: str, seq: int) -> None:
    """Delete a message of a stream; one that is gone already is not an error.

    Raises:
        nats.errors.Error: NATS refuses it or does not answer.
    """
    from nats.js.errors import APIError, NotFoundError

    try:
        await js.delete_msg(stream, seq)
    except APIError:
        # The code depends on where NATS notices that the message is gone.
        with suppress(NotFoundError):
            await js.get_msg(stream, seq=seq)
            raise
