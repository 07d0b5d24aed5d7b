"""Clients that compete with each other: the counters of those that are served, and who waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_ACCOUNTS = 4096


@dataclass(slots=True)
class Account:
    """One client's virtual tokens: those computed, and those of prompts that have started and are not computed yet."""

    counter: float = 0.0
    pending: float = 0.0


class Clients:
    """The accounts of clients that compete with each other, and how much each has `waiting`, if anything."""

    def __init__(self, offset: Callable[[str], float] = lambda name: 0.0) -> None:
        """Start empty. `offset` tells how much of a client's counter is from before, and is not lifted to."""
        self.accounts: dict[str, Account] = {}
        self.waiting: Counter[str] = Counter()
        self._last: str | None = None
        self._offset = offset

    def lowest(self, besides: str | None = None) -> float:
        """Return the lowest counter of waiting clients, except for one; infinite if no other waits."""
        return min([self.account(name).counter for name in self.waiting if name != besides], default=math.inf)

    def account(self, name: str) -> Account:
        """Return a client's account."""
        account = self.accounts.get(name)
        if account is None:
            if len(self.accounts) >= MAX_ACCOUNTS:
                self._forget()
            account = self.accounts[name] = Account()
        return account

    def enter(self, name: str) -> None:
        """Let a client wait once more; lift its counter if it had nothing waiting."""
        if not self.waiting[name]:
            account, offset = self.account(name), self._offset
            others = [other for other in self.waiting if other != name]
            if not others and self._last is not None:
                others = [self._last]
            lowest = min([self.account(other).counter - offset(other) for other in others], default=0.0)
            account.counter = max(account.counter, lowest + offset(name))
        self.waiting[name] += 1

    def leave(self, name: str) -> None:
        """Let a client wait once less."""
        self.waiting[name] -= 1
        if not self.waiting[name]:
            del self.waiting[name]
            self._last = name

    def _forget(self) -> None:
        """Drop half of the accounts: of clients that have nothing waiting, and would be lifted the most."""
        idle = [
            name
            for name, account in self.accounts.items()
            if not (self.waiting[name] or account.pending) and name != self._last
        ]
        for name in sorted(idle, key=lambda name: self.accounts[name].counter)[: MAX_ACCOUNTS // 2]:
            del self.accounts[name]
