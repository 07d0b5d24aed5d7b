"""NATS subjects, and the encoding that keeps user-chosen names out of them.

hr.req.<model>.interactive          shared interactive queue (stream `HR_INTERACTIVE`)
hr.req.<model>.resumed              published again or suspected: these go before it (the same stream)
hr.req.<model>_ready.resumed        computed elsewhere up to the first token, for workers that decode (the same stream)
hr.req.<model>.batch.<tenant>       batch queue (stream `HR_BATCH_<tenant>`)
hr.req.<model>.background.<tenant>  background responses, pulled as people's requests are (the same stream)
hr.result.<tenant>.<request>        batch results (stream `HR_RESULTS`)
hr.stored.<tenant>.<request>        each result once, as it is stored; its publisher sees it as `hr.result...`
hr.end.<tenant>.<request>           when and how a batch job ended (stream `HR_ENDS`)
hr.usage.<tenant>.<model>.<lane>.<measure>  what a tenant has had in all (counters, stream `HR_USAGE`)
hr.hours.<tenant>.<model>.<lane>.<measure>-<hour>  the same in one hour (counters, stream `HR_HOURS`)
hr.kept.<tenant>                    what a tenant's stored results amount to (the same stream)
hr.progress.<tenant>.<request>      what a running batch request has so far (stream `HR_PROGRESS`)
hr.response.<tenant>.<response>.<n> a piece of the record of a response (stream `HR_RESPONSES`)
hr.response._answers.<day>.<gateway>  what a gateway process counts of answers (the same stream)
hr.batch.<state>.<tenant>.<batch>  a batch of OpenAI's API, `active` or `ended` (stream `HR_BATCHES`)
hr.stream.<tenant>.<stream>.<...>   head, requests and pieces of a resumable stream (stream `HR_STREAMS`)
hr.stream.<tenant>.<key>.key        which stream an idempotency key stands for (the same stream)
hr.stream._j.<writer>.<slot>        new entries of all streams that a gateway generates (the same stream)
hr.media.<tenant>.<digest>.<n>      a piece of an image that requests refer to (stream `HR_MEDIA`)
hr.alias                            the table of aliases (stream `HR_ALIASES`)
hr.aliased                          each table once, as it is stored
hr.canary.<canary>.<gateway>        what a gateway process has counted of a canary (the same stream)
hr.fence.<writer>                   changed by a gateway that takes the streams of another over (the same stream)
hr.owner.<writer>                   calls to the gateway that generates streams
hr.reply.<tenant>.<...>             batch results sent to a subject that the job names
hr.dead.<model>.<lane>.<tenant>     requests in quarantine (stream `HR_DEAD`)
hr.tok.<gateway>                    frames from workers to one gateway
hr.worker.<model>.<worker>          worker heartbeats
hr.peer.<model>.<worker>            what another worker of the model says to one: offers and claims of requests; b""
                                    asks NATS whether it still listens
hr.probe.<worker>                   a gateway probes a worker whose heartbeats it misses
hr.drain.<worker>                   an operator drains a worker (b""), or b"cordon", b"uncordon", b"role prefill"; the
                                    answer is b"", or why it does not
hr.adapter.<worker>                 a gateway has a worker load an adapter
hr.name.<tenant>.<name>             what the name of an adapter means, `_` for all tenants (stream `HR_ADAPTERS`)
hr.gateway.<gateway>                gateway heartbeats
hr.host.<host>                      what a host reports of its models
hr.model.<host>                     a gateway has a host load, replace, unload, wake or put to sleep a model
hr.timeline.<gateway>               what one gateway process keeps of requests, for another
hr.cancel.<model>                   cancellations
hr.tokenizer.<model>                tokenize and detokenize, request and reply
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from shared.bounds import MAX_NAME_BYTES
from shared.errors import ConfigError, InvalidNameError
from shared.messages import Lane

Queue = Lane | Literal["resumed", "ready", "background"]
"""Where requests wait: those of people twice, since what had its turn before goes before what has not, and a third time
where their prompts are computed by workers of their own. So do batch requests: people wait for background responses, so
these do not wait behind jobs."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9-]{1,128}")
# Of each byte of a name.
_ENCODED = [chr(b) if _PLAIN_NAME.fullmatch(chr(b)) else f"_{b:02x}" for b in range(256)]
# Up to sixteen tokens of ordinary characters.
_REPLY_SUFFIX = re.compile(r"[A-Za-z0-9_-]{1,128}(\.[A-Za-z0-9_-]{1,128}){0,15}")

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
READY_SUFFIX = "_ready"
"""Behind a model's token, in the subject of the queue `ready`: no name of a model is encoded like this."""
ALL_WORKERS = "hr.worker.*.*"
ALL_GATEWAYS = "hr.gateway.*"
ALL_HOSTS = "hr.host.*"
ALIASES = "hr.alias"
ALIAS_CHANGED = "hr.aliased"
ADAPTER_NAMES = "hr.name.*.*"


def encode_name(name: str) -> str:
    """Encode a name as one subject token: letters, digits and `-` stay, every other byte becomes `_xx`."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "".join(map(_ENCODED.__getitem__, check_name(name)))


def worker_user(model: str, worker: str | None) -> str:
    """Return the NATS user of a model's workers, or of one of them; encoded names have no dot."""
    return f"worker-{encode_name(model)}" + ("" if worker is None else f".{encode_name(worker)}")


def served_by(user: str | None) -> tuple[str, str | None] | None:
    """Return the model and worker that a user of `worker_user` is for; None if it is another user."""
    if user is None or not user.startswith("worker-"):
        return None
    model, _, worker = user.removeprefix("worker-").partition(".")
    try:
        return decode_name(model), decode_name(worker) if worker else None
    except InvalidNameError:
        return None


def check_setting(variable: str, name: str, check: Callable[[str], object] | None = None) -> None:
    """Raise `ConfigError` for a name that a setting gives and that `check`, by default `check_name`, refuses."""
    try:
        (check or check_name)(name)
    except InvalidNameError as error:
        raise ConfigError(variable, f"name {error.name[:40]!r} {error.problem}") from None


def check_name(name: str) -> bytes:
    """Return the bytes of a name that can be encoded.

    Raises:
        InvalidNameError: The name is empty, holds a NUL, is not valid Unicode, or is longer than 128 bytes in UTF-8.
    """
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidNameError(name, "is not valid Unicode") from None
    if not raw or len(raw) > MAX_NAME_BYTES:
        raise InvalidNameError(name, f"must be 1 to {MAX_NAME_BYTES} bytes long in UTF-8")
    if 0 in raw:
        raise InvalidNameError(name, "must not contain a NUL character")
    return raw


def check_model_name(name: str) -> None:
    """Refuse an invalid new name of a model, an adapter or an alias: people type it and read it in tables and URLs.

    Raises:
        InvalidNameError: It cannot be encoded, is '.' or '..', or has white space or characters that do not print.
    """
    check_name(name)
    if name in (".", ".."):
        raise InvalidNameError(name, "must not be '.' or '..', which paths leave out")
    if " " in name or not name.isprintable():
        raise InvalidNameError(name, "must not contain white space, or characters that do not print")


def decode_name(token: str) -> str:
    """Return the name that `encode_name` turned into this token.

    Raises:
        InvalidNameError: `encode_name` makes no such token. A name has one encoding, or its owner would have several
            queues and limits.
    """
    try:
        raw = re.sub(r"_([0-9a-f]{2})", lambda m: chr(int(m[1], 16)), token)
        name = raw.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise InvalidNameError(token, "is not the encoding of a name") from None
    if encode_name(name) != token:
        raise InvalidNameError(token, f"is not the encoding of {name[:40]!r}")
    return name


def _of_one(pattern: str) -> Callable[[str], str]:
    return lambda name: pattern.format(encode_name(name))


def _of_two(pattern: str) -> Callable[[str, str], str]:
    return lambda first, second: pattern.format(encode_name(first), encode_name(second))


# Each returns a subject, a filter of several, or their beginning, for the names that the table above has in its place.
frame_subject = _of_one("hr.tok.{}")
gateway_subject = _of_one("hr.gateway.{}")
timeline_subject = _of_one("hr.timeline.{}")
owner_subject = _of_one("hr.owner.{}")
fence_subject = _of_one("hr.fence.{}")
worker_subject = _of_two("hr.worker.{}.{}")
workers_filter = _of_one("hr.worker.{}.*")
peer_subject = _of_two("hr.peer.{}.{}")
probe_subject = _of_one("hr.probe.{}")
drain_subject = _of_one("hr.drain.{}")
adapter_subject = _of_one("hr.adapter.{}")
cancel_subject = _of_one("hr.cancel.{}")
tokenizer_subject = _of_one("hr.tokenizer.{}")
host_subject = _of_one("hr.host.{}")
model_order_subject = _of_one("hr.model.{}")
result_subject = _of_two("hr.result.{}.{}")
results_filter = _of_one("hr.result.{}.*")
stored_subject = _of_two("hr.stored.{}.{}")
stored_filter = _of_one("hr.stored.{}.*")
end_subject = _of_two("hr.end.{}.{}")
ends_filter = _of_one("hr.end.{}.*")
progress_subject = _of_two("hr.progress.{}.{}")
ledger_subject = _of_one("hr.kept.{}")
responses_filter = _of_one("hr.response.{}.>")
media_filter = _of_one("hr.media.{}.*.*")
reply_prefix = _of_one("hr.reply.{}.")


def request_subject(model: str, queue: Queue, tenant: str) -> str:
    """Subject on which a request waits: shared by all workers of the model."""
    if queue in ("batch", "background"):
        return f"hr.req.{encode_name(model)}.{queue}.{encode_name(tenant)}"
    if queue == "ready":
        # Streams and permissions of earlier versions let it pass.
        return f"hr.req.{encode_name(model)}{READY_SUFFIX}.resumed"
    return f"hr.req.{encode_name(model)}.{queue}"


def adapter_name_subject(tenant: str | None, name: str) -> str:
    """Subject of the record of a tenant's name of an adapter; None for a name that all tenants share."""
    return f"hr.name.{'_' if tenant is None else encode_name(tenant)}.{encode_name(name)}"


def usage_subject(tenant: str, model: str, lane: Lane, measure: str) -> str:
    """Subject of one total of what a tenant has had of a model."""
    return f"hr.usage.{encode_name(tenant)}.{encode_name(model)}.{lane}.{measure}"


def hour_subject(tenant: str, model: str, lane: Lane, measure: str) -> str:
    """Subject of what a tenant has had of a model in one hour, which `measure` ends with."""
    return f"hr.hours.{encode_name(tenant)}.{encode_name(model)}.{lane}.{measure}"


def answers_subject(day: str, process: str) -> str:
    """Subject of what a process counts of a day's answers; `*` is the filter of all. No tenant has this name."""
    return f"hr.response._answers.{day}.{process}"


def response_subject(tenant: str, response_id: str, piece: int | None = None) -> str:
    """Subject of a piece of the record of a response; without a number, the filter of all pieces."""
    return f"hr.response.{encode_name(tenant)}.{encode_name(response_id)}.{'*' if piece is None else piece}"


def batch_subject(state: str, tenant: str, batch_id: str) -> str:
    """Subject under which the record of a batch is stored; its state is `active` or `ended`."""
    return f"hr.batch.{state}.{encode_name(tenant)}.{encode_name(batch_id)}"


def batches_filter(state: str, tenant: str | None = None) -> str:
    """Subject filter of the batches of a tenant in a state, or of all tenants."""
    return f"hr.batch.{state}.{'*' if tenant is None else encode_name(tenant)}.*"


def stream_subject(tenant: str, stream_id: str, *place: str | int) -> str:
    """Subject of a part of a resumable stream; `>` as the place is the filter of all parts."""
    return ".".join((_stream_prefix(tenant, stream_id), *map(str, place)))


@lru_cache(maxsize=4096)
def _stream_prefix(tenant: str, stream_id: str) -> str:
    """Encode the names of a stream once: a gateway writes dozens of its parts."""
    return f"hr.stream.{encode_name(tenant)}.{encode_name(stream_id)}"


def streams_filter(tenant: str | None, part: str = ">") -> str:
    """Subject filter of the resumable streams of a tenant or of all tenants, or of one part of each."""
    return f"hr.stream.{'*' if tenant is None else encode_name(tenant)}.{part}"


def media_subject(tenant: str, digest: bytes, piece: int | str) -> str:
    """Subject of a piece of an image, `*` for all; that of `long` says that the image is stored for a batch."""
    return f"hr.media.{encode_name(tenant)}.{digest.hex()}.{piece}"


def journal_subject(writer: str, slot: int | None = None) -> str:
    """Subject of a message of a gateway's journal; without a slot, the filter of all. No tenant is encoded as `_j`."""
    return f"hr.stream._j.{encode_name(writer)}.{'*' if slot is None else slot}"


def is_batch_reply(subject: str, tenant: str) -> bool:
    """Return whether a batch job of this tenant may have its result sent to this subject."""
    prefix = reply_prefix(tenant)
    return subject.startswith(prefix) and _REPLY_SUFFIX.fullmatch(subject, len(prefix)) is not None


def dead_letter_subject(model: str, lane: Lane, tenant: str) -> str:
    """Subject under which a request in quarantine is stored."""
    return f"hr.dead.{encode_name(model)}.{lane}.{encode_name(tenant)}"


def dead_letter_filter(model: str | None = None, lane: Lane | None = None, tenant: str | None = None) -> str:
    """Subject filter of dead letters; None means any."""
    tokens = (model and encode_name(model), lane, tenant and encode_name(tenant))
    return ".".join(("hr.dead", *(token or "*" for token in tokens)))


def canary_subject(canary: str, gateway: str) -> str:
    """Return where a gateway process keeps its counts of a canary; `*` stands for any."""
    return f"hr.canary.{canary}.{gateway}"
