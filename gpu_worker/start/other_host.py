"""What `headrace worker` does on a host of a group on which rank 0 is not."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from gpu_worker.engine.engine import EngineStats
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.health_port import HealthPort, bind_health_port

if TYPE_CHECKING:
    from gpu_worker.execution.ranks.node import Node

_IDLE = EngineStats(
    step=0, running=0, running_batch=0, waiting=0, waiting_batch=0, max_batch_seqs=0, waiting_tokens=0, free_blocks=0,
    total_blocks=0, max_num_seqs=0, num_preemptions=0, num_prefix_queries=0, num_prefix_hits=0, prefill_rate=0,
    decode_rate=0, num_failed_steps=0, is_fatal=False,
)  # fmt: skip


def serve_host(config: WorkerConfig) -> int:
    """Start ranks for host 0 until this process is ended; `HeadraceError` if settings do not fit or rank 0 refuses."""
    from gpu_worker.execution.ranks.node import Node
    from gpu_worker.start.engine_setup import rank_settings

    assert config.master_addr is not None
    assert config.group_token is not None
    bound = bind_health_port(config.health_host, config.health_port)
    # The first process of a container has no handler of its own.
    signal.signal(signal.SIGTERM, lambda _, __: sys.exit(0))
    node = Node(rank_settings(config), config.log_level, config.log_format)
    if bound is not None:
        threading.Thread(target=lambda: asyncio.run(_answer_probes(node, bound)), name="health", daemon=True).start()
    node.serve(config.master_addr, config.master_port, config.group_token, config.node_rank)
    return 0


async def _answer_probes(node: Node, bound: socket.socket) -> None:
    health = HealthPort(lambda: _IDLE, lambda: True, lambda: None if node.is_connected else "rank 0 is not there")
    health.is_taking_requests = True
    await health.start(bound)
    await asyncio.Event().wait()
