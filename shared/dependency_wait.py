"""Waiting at start for what NATS does not have yet: JetStream, a stream, a permission.

Parts of a system start in any order, and an administrator may make streams or give permissions later. A process that
needs them waits and says what for, instead of ending and being started again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats.errors import ConnectionClosedError

from shared.errors import DependencyError
from shared.log_limit import LogLimit
from shared.nats_connection import SEND_ERRORS

RETRY_S = 0.5
# For what few need, and what an attempt without permission costs a line in the log of NATS.
RECORDS_RETRY_S = 10.0
LOG_INTERVAL_S = 10.0
RECORDS_LOG_INTERVAL_S = 600.0

Result = TypeVar("Result")

_RETRIED: tuple[type[Exception], ...] = (DependencyError, *SEND_ERRORS)

_log = logging.getLogger(__name__)


async def wait_for(
    what: str,
    action: Callable[[], Awaitable[Result]],
    retry_s: float = RETRY_S,
    log_interval_s: float = LOG_INTERVAL_S,
) -> Result:
    """Return the result of `action` as soon as it succeeds; until then, log now and then that it waits for `what`.

    It is tried every `retry_s`, also when NATS refuses it: permissions may be given later.

    Raises:
        DependencyError: The connection to NATS is over for good.
    """
    log_limit = LogLimit(_log, log_interval_s)
    while True:
        try:
            return await action()
        except ConnectionClosedError as error:
            raise DependencyError(f"NATS closed the connection while {what} was waited for.") from error
        except _RETRIED as error:
            log_limit.warning(what, "waiting for %s: %s", what, error)
        await asyncio.sleep(retry_s)
