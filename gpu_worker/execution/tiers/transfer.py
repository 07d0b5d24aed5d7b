"""What a worker with a role gives its KV to others by, and fetches theirs: leases, a server, and a tier of peers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Values
from concurrent.futures import ThreadPoolExecutor

from gpu_worker.execution.memory.block_bytes import BlockBytes
from gpu_worker.execution.tiers.block_server import BlockServer
from gpu_worker.execution.tiers.file_format import Maker
from gpu_worker.execution.tiers.host_tier import HostTier
from gpu_worker.execution.tiers.leases import Leases
from gpu_worker.execution.tiers.nixl_transport import NixlAgent
from gpu_worker.execution.tiers.peer_tier import PeerTier
from shared.worker_metrics import KvTierReading

_log = logging.getLogger(__name__)

NUM_OPENERS = 8


class Transfer:
    """Joins the parts.

    Attributes:
        openers: Threads in which leases of other workers are opened: one that hangs takes one of them for a second.
        num_openers: Their number.
        block_bytes: Bytes of a block of the group that keeps all tokens; a block is of `block_tokens`.
    """

    def __init__(
        self,
        groups: Values[BlockBytes],
        block_tokens: int,
        host: HostTier,
        address: str,
        lease_s: float,
        make_maker: Callable[[], Maker],
        nixl: NixlAgent | None = None,
    ) -> None:
        """Listen; `make_maker` reads all weights, in a thread. `ConfigError` if the address cannot be used."""
        self.leases = Leases(host, lease_s)
        rows = [group.row_bytes for group in groups]
        self._nixl = nixl
        self.peers = PeerTier(rows, block_tokens, nixl)
        self.server = BlockServer(address, self.leases, lambda: self.peers.maker, nixl)
        self.num_openers = NUM_OPENERS
        self.openers = ThreadPoolExecutor(self.num_openers, "kv-open")
        self.block_bytes, self.block_tokens = groups[0].row_bytes, block_tokens
        threading.Thread(target=self._find_maker, args=(make_maker,), name="kv-maker", daemon=True).start()
        _log.info("KV is given to other workers at %s", self.server.address)

    @property
    def maker(self) -> str:
        """Name whose KV can be used here; empty while it is not known."""
        maker = self.peers.maker
        return "" if maker is None else maker.folder

    def reading(self, hit_tokens: int, loaded_bytes: int) -> KvTierReading:
        """Return the counts: leased bytes as used, sent bytes as stored."""
        leases, peers = self.leases, self.peers
        return KvTierReading(
            "peer",
            used_bytes=leases.num_bytes,
            total_bytes=leases.max_bytes,
            hit_tokens=hit_tokens,
            stored_bytes=leases.sent_bytes,
            loaded_bytes=loaded_bytes,
            dropped=leases.num_unread,
            refused=peers.num_refused,
            failed=peers.num_failed,
        )

    def close(self) -> None:
        """Give and fetch nothing more."""
        self.server.close()
        self.leases.close()
        self.peers.end()
        self.openers.shutdown(wait=False, cancel_futures=True)
        if self._nixl is not None:
            self._nixl.close()

    def _find_maker(self, make_maker: Callable[[], Maker]) -> None:
        try:
            self.peers.maker = make_maker()
        except Exception:
            _log.exception("the weights cannot be read; no KV is given to other workers")
