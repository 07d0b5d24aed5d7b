"""Virtual token counters: how much service each tenant has had, and each key of a tenant.

A counter grows by the tokens computed for its client, over the weight of the key: 1 for a token of a prompt, 2 for a
generated one. The lowest goes first. Who returns after an absence is lifted to the lowest of those that wait, or else
to the client that waited last. Source: Sheng et al. (arXiv 2401.00588), algorithm 2. It charges a prompt at admission;
here admitted tokens are `pending` until they are computed, so one long prompt delays other clients by a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gpu_worker.core.sequence import Sequence

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
PRIORITY_TOKENS = 8192.0
"""Virtual tokens one priority level is worth. The advantage ends once the client has been served this much more, so no
client starves."""

_MAX_ACCOUNTS = 4096


@dataclass(slots=True)
class Account:
    """One client's virtual tokens: those computed, and those of prompts that have started and are not computed yet."""

    counter: float = 0.0
    pending: float = 0.0


class Clients:
    """The accounts of clients that compete with each other, and which of them have something waiting."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self._num_waiting: Counter[str] = Counter()
        self._last: Account | None = None

    def account(self, name: str) -> Account:
        """Return a client's account."""
        account = self.accounts.get(name)
        if account is None:
            if len(self.accounts) >= _MAX_ACCOUNTS:
                self._forget()
            account = self.accounts[name] = Account()
        return account

    def enter(self, name: str) -> None:
        """Let a client wait once more; lift its counter if it had nothing waiting."""
        if not self._num_waiting[name]:
            account, others = self.account(name), [self.account(other) for other in self._num_waiting if other != name]
            if others:
                account.counter = max(account.counter, min([other.counter for other in others]))
            elif self._last is not None:
                account.counter = max(account.counter, self._last.counter)
        self._num_waiting[name] += 1

    def leave(self, name: str) -> None:
        """Let a client wait once less."""
        self._num_waiting[name] -= 1
        if not self._num_waiting[name]:
            del self._num_waiting[name]
            self._last = self.account(name)

    def _forget(self) -> None:
        """Drop half of the accounts: of clients that have nothing waiting, and would be lifted the most."""
        idle = [name for name, account in self.accounts.items() if not (self._num_waiting[name] or account.pending)]
        for name in sorted(idle, key=lambda name: self.accounts[name].counter)[: _MAX_ACCOUNTS // 2]:
            del self.accounts[name]


class VirtualCounters:
    """The counters of one lane, by tenant and by key. Also writes `Sequence.num_charged_tokens`."""

    def __init__(self) -> None:
        self.tenants = Clients()
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
        """Move what was computed for a sequence, and never before, to the counters of its tenant and its key."""
        if sequence.num_computed_tokens > sequence.num_charged_tokens:
            _charge(sequence, self._accounts(sequence))

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
                _charge(sequence, both)
            if is_catching_up:
                self._add_pending(sequence)

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
        """Return what is still to be charged of a sequence's input."""
        return max(0, sequence.num_input_tokens - sequence.num_charged_tokens) * INPUT_WEIGHT / sequence.weight

    def _accounts(self, sequence: Sequence) -> tuple[Account, Account]:
        return self.tenants.account(sequence.tenant), self._keys_of(sequence.tenant).account(sequence.key)

    def _keys_of(self, tenant: str) -> Clients:
        keys = self._keys.get(tenant)
        if keys is None:
            if len(self._keys) >= _MAX_ACCOUNTS:
                self._keys = {name: keys for name, keys in self._keys.items() if name in self.tenants.accounts}
            keys = self._keys[tenant] = Clients()
        return keys


def _charge(sequence: Sequence, accounts: tuple[Account, Account]) -> None:
    num_charged, num_computed = sequence.num_charged_tokens, sequence.num_computed_tokens
    num_input = max(0, min(num_computed, sequence.num_input_tokens) - num_charged)
    num_output = num_computed - num_charged - num_input
    cost = (num_input * INPUT_WEIGHT + num_output * OUTPUT_WEIGHT) / sequence.weight
    for account in accounts:
        account.counter += cost
    sequence.num_charged_tokens = num_computed
