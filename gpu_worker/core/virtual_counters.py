"""Virtual token counters: how much service each tenant has had, and each key of a tenant.

A counter grows by the tokens computed for its client, over the weight of the key: 1 for a token of a prompt, and for as
much of an image in its tower as takes that long, 2 for a generated one. The lowest goes first. Who returns after an
absence is lifted to the lowest of those that wait, or else to the client that waited last. Source: Sheng et al. (arXiv
2401.00588), algorithm 2. It charges a prompt at admission; here admitted tokens are `pending` until they are computed,
so one long prompt delays other clients by a step.

The counters of tenants also grow by what other workers serve them (`FleetService`).
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_worker.core.clients import MAX_ACCOUNTS, Account, Clients
from gpu_worker.core.fleet_service import FleetService, HeardServices
from gpu_worker.core.sequence import Sequence
from shared.services import TenantService

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
PRIORITY_TOKENS = 8192.0
"""Virtual tokens one priority level is worth. The advantage ends once the client has been served this much more, so no
client starves."""


class VirtualCounters:
    """The counters of one lane, by tenant and by key. Also writes `Sequence.num_charged_tokens`."""

    def __init__(self) -> None:
        self._fleet = FleetService()
        self.tenants = Clients(self._fleet.offset)
        self._keys: dict[str, Clients] = {}
        self._pending: list[Account] = []

    def enter(self, sequence: Sequence) -> None:
        """Count a sequence among those that wait. Counters have to be settled."""
        self.tenants.enter(sequence.tenant)
        self._keys_of(sequence.tenant).enter(sequence.key)

    def leave(self, sequence: Sequence) -> None:
        """Count a sequence out that waited."""
        self.tenants.leave(sequence.tenant)
        self._keys_of(sequence.tenant).leave(sequence.key)

    def start(self, sequence: Sequence) -> None:
        """Charge a sequence that has just been given blocks with its prompt, but for what the prefix cache holds."""
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, sequence.num_computed_tokens)
        self._add_pending(sequence)

    def charge(self, sequence: Sequence) -> None:
        """Move tokens that a sequence has computed for the first time to the counters of its tenant and its key."""
        if sequence.num_computed_tokens > sequence.num_charged_tokens:
            self._charge(sequence, self._accounts(sequence))

    def charge_images(self, sequence: Sequence, num_tokens: float) -> None:
        """Charge what a step encodes of a sequence's images, in tokens of a prompt that take as long."""
        self._add(sequence, self._accounts(sequence), num_tokens * INPUT_WEIGHT / sequence.weight)

    def hear(self, heard: HeardServices) -> None:
        """Take in what other workers have told of tenants."""
        for tenant, ahead in heard.ahead.items():
            more = self._fleet.adopt(tenant, ahead)
            if more and (account := self.tenants.accounts.get(tenant)) is not None:
                account.counter += more
        self._fleet.hear(heard.served)

    def services(self) -> list[TenantService]:
        """Return what to tell other workers; counters have to be settled."""
        return self._fleet.services(self.tenants)

    def settle(self, running: Iterable[Sequence]) -> None:
        """Bring all accounts up to date; `running` are the sequences that have started."""
        for account in self._pending:
            account.pending = 0.0
        self._pending.clear()
        accounts: dict[tuple[str, str], tuple[Account, Account]] = {}
        for sequence in running:
            is_catching_up = sequence.num_charged_tokens < sequence.num_input_tokens
            if sequence.num_computed_tokens > sequence.num_charged_tokens:
                share = (sequence.tenant, sequence.key)
                both = accounts.get(share)
                if both is None:
                    both = accounts[share] = self._accounts(sequence)
                self._charge(sequence, both)
            if is_catching_up:
                self._add_pending(sequence)
        self._fleet.take_told(self.tenants)

    def standing(self, sequence: Sequence) -> tuple[float, float]:
        """Return where a sequence stands among those that want to start; less goes first. Tenant before key."""
        ahead, (tenant, key) = sequence.priority * PRIORITY_TOKENS, self._accounts(sequence)
        return tenant.counter + tenant.pending - ahead, key.counter + key.pending - ahead

    def may_pass(self, sequence: Sequence, first: Sequence) -> bool:
        """Whether a sequence may start before another one, whose turn it is and for which there is no room.

        True if, after charging both prompts, its client's counter is at most the other's.
        """
        level = 0 if sequence.tenant != first.tenant else 1
        after, after_first = self._cost(sequence), self._cost(first)
        return self.standing(sequence)[level] + after <= self.standing(first)[level] + after_first

    def turn(self, sequence: Sequence) -> tuple[float, float, float, float]:
        """Return whose prompt is computed first in a step; less goes first. Of equals, who has less to compute."""
        ahead, (tenant, key) = sequence.priority * PRIORITY_TOKENS, self._accounts(sequence)
        return tenant.counter - ahead, tenant.pending, key.counter - ahead, key.pending

    def _add_pending(self, sequence: Sequence) -> None:
        cost = self._cost(sequence)
        if cost > 0:
            for account in self._accounts(sequence):
                account.pending += cost
                self._pending.append(account)

    def _cost(self, sequence: Sequence) -> float:
        return max(0, sequence.num_input_tokens - sequence.num_charged_tokens) * INPUT_WEIGHT / sequence.weight

    def _accounts(self, sequence: Sequence) -> tuple[Account, Account]:
        return self.tenants.account(sequence.tenant), self._keys_of(sequence.tenant).account(sequence.key)

    def _keys_of(self, tenant: str) -> Clients:
        keys = self._keys.get(tenant)
        if keys is None:
            if len(self._keys) >= MAX_ACCOUNTS:
                self._keys = {name: keys for name, keys in self._keys.items() if name in self.tenants.accounts}
            keys = self._keys[tenant] = Clients()
        return keys

    def _charge(self, sequence: Sequence, accounts: tuple[Account, Account]) -> None:
        num_charged, num_computed = sequence.num_charged_tokens, sequence.num_computed_tokens
        num_input = max(0, min(num_computed, sequence.num_input_tokens) - num_charged)
        num_output = num_computed - num_charged - num_input
        cost = (num_input * INPUT_WEIGHT + num_output * OUTPUT_WEIGHT) / sequence.weight
        self._add(sequence, accounts, cost)
        sequence.num_charged_tokens = num_computed

    def _add(self, sequence: Sequence, accounts: tuple[Account, Account], cost: float) -> None:
        for account in accounts:
            account.counter += cost
        self._fleet.charge(sequence.tenant, cost)
