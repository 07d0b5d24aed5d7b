"""Where host 0 of a worker of several hosts listens for the others."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from gpu_worker.start.config import WorkerConfig
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.execution.ranks.remote import Remote

_log = logging.getLogger(__name__)


def listen_for_hosts(config: WorkerConfig) -> Remote | None:
    """Listen for the other hosts; None where there are none.

    Raises:
        ConfigError: The address cannot be used.
    """
    from gpu_worker.execution.ranks.remote import Remote

    if config.nnodes == 1:
        return None
    assert config.master_addr is not None
    assert config.group_token is not None
    try:
        address = socket.gethostbyname(config.master_addr)
        remote = Remote(address, config.master_port, config.group_token, config.nnodes)
    except OSError as error:
        problem = f"{config.master_addr}:{config.master_port} cannot be used on host 0: {error.strerror or error}"
        raise ConfigError("HEADRACE_MASTER_ADDR", problem) from None
    _log.info("waiting for %d hosts at %s:%d", config.nnodes - 1, address, remote.port)
    return remote
