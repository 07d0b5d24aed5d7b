"""Compiled grammars of the last requests, each tenant's apart.

A tenant finds what it has compiled itself and nothing else: it can neither learn from the time of an answer what others
ask for, nor drive out what they use as long as it takes more room than they do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from gpu_worker.structured_output.compiled_grammar import CompiledGrammar
from shared.grammar import Grammar

MAX_BYTES = 256 << 20
MAX_TENANT_GRAMMARS = 128


class GrammarCache:
    """Keeps the latest grammars, within a number of bytes for all and a number of grammars for each tenant."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_tenant_grammars: int = MAX_TENANT_GRAMMARS) -> None:
        """Keep nothing yet."""
        self._max_bytes = max_bytes
        self._max_tenant_grammars = max_tenant_grammars
        self._lock = threading.Lock()
        self._grammars: dict[str, OrderedDict[Grammar, CompiledGrammar]] = {}
        self._num_bytes: dict[str, int] = {}

    def get(self, tenant: str, grammar: Grammar) -> CompiledGrammar | None:
        """Return a tenant's compiled grammar, if it is still kept."""
        with self._lock:
            own = self._grammars.get(tenant)
            compiled = None if own is None else own.get(grammar)
            if own is not None and compiled is not None:
                own.move_to_end(grammar)
            return compiled

    def add(self, tenant: str, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Keep a tenant's compiled grammar, and drop others where there is too much."""
        with self._lock:
            own = self._grammars.setdefault(tenant, OrderedDict())
            if grammar in own:
                return
            own[grammar] = compiled
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + compiled.num_bytes
            if len(own) > self._max_tenant_grammars:
                self._drop_oldest(tenant)
            while sum(self._num_bytes.values()) > self._max_bytes:
                self._drop_oldest(max(self._num_bytes, key=self._num_bytes.__getitem__))

    def _drop_oldest(self, tenant: str) -> None:
        _, dropped = self._grammars[tenant].popitem(last=False)
        self._num_bytes[tenant] -= dropped.num_bytes
        if not self._grammars[tenant]:
            del self._grammars[tenant], self._num_bytes[tenant]
