"""What each gateway process knows of aliases: it resolves names, and counts what both arms of canaries come to.

Owns the process's copy of the table and its counts. `gateway.aliases.store` brings the table, and adds up the counts of
all processes.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from gateway.aliases.comparison import ArmCounts, BothArms
from gateway.aliases.table import Alias, AliasTable, Canary
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet
from gateway.generation import Generation
from shared.messages import UNDECODABLE, Delta

Labels = tuple[str, str, str, str]


# A conversation may be a program that asks all day: what it has does not count as a hundred different requests.
MAX_COUNTED = 5
_MAX_REMEMBERED = 20_000

MODEL_CODES = frozenset({"context_length_exceeded", "unsupported_image"})
"""Refusals that follow from the model: a canary that cannot do what the other one does gives more of them."""
# Refusals that follow from the load or the gateway: which arm gets more of them says nothing of its model.
_GATEWAYS_CODES = frozenset({"overloaded", "queue_full", "shutting_down"})


class _Metadata(Struct):
    user_id: str | None = None


class _Sender(Struct):
    """What a body says of whose conversation it is; other fields are skipped."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: _Metadata | None = None


_read_sender = msgspec.json.Decoder(_Sender).decode


@dataclass(slots=True, eq=False)
class ArmProbe:
    """Measures one request of an alias with a canary: into `counts`, and by alias, tenant and arm into `told`.

    Attributes:
        wants_logprobs: Its worker is to report log probabilities; `total` and `num` add them up.
        has_own_timeout: The client has chosen the time that the answer may take: one that is late is no failure.
    """

    counts: ArmCounts
    wants_logprobs: bool
    told: Counter[Labels]
    labels: tuple[str, str, str]
    has_own_timeout: bool = False
    total: float = 0.0
    num: int = 0

    def ended(self, error: ApiError | None, started: float, first_token_at: float | None, num_tokens: int) -> None:
        """Count an answer that ends now; times are those of `time.perf_counter()`."""
        if error is not None:
            self.failed(error)
        elif first_token_at is None:
            self.answered(None, None)
        else:
            itl_s = (time.perf_counter() - first_token_at) / (num_tokens - 1) if num_tokens > 1 else None
            self.answered(first_token_at - started, itl_s)

    def answered(self, ttft_s: float | None, itl_s: float | None) -> None:
        """Count an answer that was generated."""
        counts = self.counts
        counts.requests += 1
        self.told[*self.labels, "answered"] += 1
        if ttft_s is not None:
            counts.ttft.add(ttft_s)
        if itl_s is not None:
            counts.itl.add(itl_s)
        if self.num:
            mean = self.total / self.num
            counts.logprob += mean
            counts.num_logprobs += 1
            counts.perplexity.add(math.exp(min(50.0, -mean)))

    def failed(self, error: ApiError) -> None:
        """Count an answer that the server failed to give, or that its model cannot give; not the client's faults."""
        is_late = error.status == 408 and not self.has_own_timeout
        is_servers = (error.status >= 500 and error.code not in _GATEWAYS_CODES) or is_late
        if is_servers or error.code in MODEL_CODES:
            self.counts.requests += 1
            self.counts.errors += 1
            self.told[*self.labels, "failed"] += 1


class LogprobTap:
    """Reads the log probabilities on their way to a sink; `hides` removes those that the client did not ask for."""

    __slots__ = ("_hides", "_probe", "_sink")

    def __init__(self, sink: Sink, probe: ArmProbe, *, hides: bool) -> None:
        self._sink = sink
        self._probe = probe
        self._hides = hides

    def deliver(self, delta: Delta) -> None:
        """Take a piece."""
        if delta.logprobs:
            self._probe.total += sum(max(-1e3, each.logprob) for each in delta.logprobs)
            self._probe.num += len(delta.logprobs)
            if self._hides:
                delta = msgspec.structs.replace(delta, logprobs=None)
        self._sink.deliver(delta)

    def fail(self, error: ApiError) -> None:
        """Learn that the sequence ended otherwise."""
        self._sink.fail(error)


class AliasBook:
    """The table as this process knows it, and its counts by canary.

    Attributes:
        told: Counts for metrics: by alias, tenant, arm and outcome.
        table: The aliases.
        own: What this process has counted, by canary.
    """

    def __init__(self) -> None:
        self.told: Counter[Labels] = Counter()
        self.table = AliasTable()
        self.own: dict[str, BothArms] = {}
        # By canary and conversation: how many of its requests are counted.
        self._counted: dict[str, Counter[bytes]] = {}
        self._by_name: dict[tuple[str, str | None], Alias] = {}

    def take(self, table: AliasTable) -> None:
        """Know a new table from now on. The counts of canaries that it does not have are dropped."""
        self.table = table
        self._by_name = {(each.name, each.tenant): each for each in table.aliases}
        canaries = {each.canary.id for each in table.aliases if each.canary is not None}
        self.own = {canary: arms for canary, arms in self.own.items() if canary in canaries}
        self._counted = {canary: counts for canary, counts in self._counted.items() if canary in canaries}

    def find(self, name: str, tenant: str, fleet: Fleet) -> Alias | None:
        """Return the alias that a tenant's name means, its own before that of all.

        A served model hides aliases, and so does an adapter that an operator has named, but not what workers alone call
        an adapter: a login for one model would take the requests of others.
        """
        if not self._by_name:
            return None
        alias = self._by_name.get((name, tenant)) or self._by_name.get((name, None))
        return None if alias is None or fleet.settles(name, tenant) else alias

    def target(self, name: str, tenant: str, fleet: Fleet) -> str:
        """Return the model that a name stands for, without a canary."""
        alias = self.find(name, tenant, fleet)
        return name if alias is None else alias.model

    def visible(self, tenant: str, fleet: Fleet) -> dict[str, str]:
        """Return the aliases of a tenant whose models are served, with these."""
        names = {each.name: self.target(each.name, tenant, fleet) for each in self.table.aliases}
        return {name: model for name, model in names.items() if name != model and is_served(fleet, model, tenant)}

    def settled(self, generation: Generation, tenant: str, fleet: Fleet) -> Generation:
        """Return a generation with the model that its name stands for, without a canary."""
        alias = self.find(generation.model, tenant, fleet)
        return generation if alias is None else _with_target(generation, alias.model)

    def has_canary(self, generation: Generation, tenant: str, fleet: Fleet) -> bool:
        """Whether the model of a generation follows from its conversation."""
        alias = self.find(generation.model, tenant, fleet)
        return alias is not None and alias.running is not None and not generation.waits_long

    def split(
        self, generation: Generation, tenant: str, fleet: Fleet, conversation: bytes
    ) -> tuple[Generation, ArmProbe | None]:
        """Return a generation with the model that its name stands for, and what measures it where a canary runs.

        The arm follows from the alias, the tenant and the conversation: all requests of a conversation, and all
        repetitions of a request, get the same one, and its first few are measured. While the canary has no worker, all
        requests go to the other arm, and none is measured.
        """
        alias = self.find(generation.model, tenant, fleet)
        if alias is None:
            return generation, None
        canary = alias.running
        if canary is None or generation.waits_long or not has_workers(fleet, canary.model, tenant):
            return _with_target(generation, alias.model), None
        place, other = _places(alias, canary, tenant, conversation)
        is_canary = place * 100 < canary.percent
        target = _with_target(generation, canary.model if is_canary else alias.model)
        if not self._counts(canary.id, tenant.encode() + conversation):
            return target, None
        arms = self.own.setdefault(canary.id, BothArms())
        wants_logprobs = other < canary.rules.logprob_share
        arm, counts = ("canary", arms.canary) if is_canary else ("stable", arms.stable)
        labels = (alias.name, alias.tenant or "", arm)
        return target, ArmProbe(counts, wants_logprobs, self.told, labels, generation.timeout_s is not None)

    def _counts(self, canary: str, conversation: bytes) -> bool:
        """Whether a further request of a conversation is measured."""
        counted = self._counted.setdefault(canary, Counter())
        if len(counted) >= _MAX_REMEMBERED:
            counted.clear()
        counted[conversation] += 1
        return counted[conversation] <= MAX_COUNTED


def is_served(fleet: Fleet, name: str, tenant: str | None) -> bool:
    """Whether a name is that of a model or an adapter that workers serve, or served minutes ago."""
    return fleet.knows(name) or fleet.find_adapter(name, tenant) is not None


def has_workers(fleet: Fleet, model: str, tenant: str | None) -> bool:
    """Whether live workers serve a model, or an adapter of a tenant."""
    found = fleet.find_adapter(model, tenant)
    return fleet.num_workers(model) > 0 or (found is not None and found.digest is not None)


def _with_target(generation: Generation, model: str) -> Generation:
    return msgspec.structs.replace(generation, model=model, alias=generation.model)


def conversation_of(generation: Generation, body: bytes) -> bytes:
    """Return a digest of what a conversation's requests share: a name in the body, or how the prompt begins."""
    return hashlib.blake2b(_conversation(generation, body), digest_size=16).digest()


def _conversation(generation: Generation, body: bytes) -> bytes:
    try:
        sender = _read_sender(body)
        user_id = None if sender.metadata is None else sender.metadata.user_id
        named = sender.user or sender.safety_identifier or sender.prompt_cache_key or user_id
    except UNDECODABLE:
        named = None
    if named:
        return b"n" + named.encode("utf-8", "surrogatepass")
    prompt = generation.prompts[0]
    if prompt.messages is None:
        return b"p" + msgspec.msgpack.encode((prompt.text, prompt.token_ids, prompt.query))
    first = next((at for at, each in enumerate(prompt.messages) if each.role == "user"), 0)
    return b"m" + msgspec.msgpack.encode([each.content for each in prompt.messages[: first + 1]])


def _places(alias: Alias, canary: Canary, tenant: str, conversation: bytes) -> tuple[float, float]:
    """Return two numbers between 0 and 1 that decide the arm, and whether log probabilities are asked for."""
    text = b"\0".join((alias.name.encode(), (alias.tenant or "").encode(), canary.id.encode(), tenant.encode()))
    digest = hashlib.blake2b(conversation, digest_size=16, key=hashlib.sha256(text).digest()).digest()
    return int.from_bytes(digest[:8]) / 2**64, int.from_bytes(digest[8:]) / 2**64
