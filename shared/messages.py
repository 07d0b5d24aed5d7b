"""The wire messages between gateways, workers and batch publishers.

Every message is a tagged msgspec Struct carried as msgpack. Unknown fields are ignored, so a newer peer may add
fields at the end. `Request` is encoded as a map, because people write it by hand, also as JSON, in which unknown fields
are refused. Messages sent once per step (`Frame`, `Delta`) are encoded as arrays, because size and speed matter.
One wire request is one sequence: the gateway turns `n` choices and lists of prompts into several requests.
"""

from __future__ import annotations

import builtins
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from shared import bounds
from shared.adapter_calls import AdapterBeats, AdapterName, NamesRead, ResidentAdapters
from shared.cache_hints import CacheHints
from shared.conversation import ChatOptions, Messages
from shared.disaggregation import KvReady, RoleNews
from shared.kv_budget import EvictedBlocks, KvBudget
from shared.media import Media
from shared.pooling import Pooling, Task
from shared.prefixes import PrefixNews
from shared.receipt import Receipt, Timing
from shared.request_fields import check_fields
from shared.sampling import DefaultedName, Sampling, SamplingDefaults
from shared.services import Services, ServicesOfModels
from shared.worker_metrics import WorkerMetrics

PROTOCOL_VERSION = 1
Lane = Literal["interactive", "batch"]
Awaited = Annotated[dict[bounds.PeerName, tuple[bounds.NumRequests, bounds.NumTokens]], Meta(max_length=4096)]
Features = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=64)]
FinishReason = Literal["stop", "length", "cancelled", "expired", "failed", "handoff"]


class Request(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="request"):
    """One sequence to generate. Exactly one of `messages`, `text` and `token_ids` is the prompt.

    Attributes:
        id: Made by the gateway; a batch publisher chooses its own, unique within its tenant.
        epoch: Attempt number. Deltas of an older epoch are ignored by the receiver: this is the fence, not the ack.
        tenant: Owner; salts the prefix cache and names the batch result subject.
        priority: Larger runs earlier within a lane.
        deadline: Unix seconds after which the client no longer waits.
        reply: Subject for frames (`hr.tok.<gateway>`). A batch request may name a subject of its tenant,
            `hr.reply.<tenant>.<...>`, that gets its result too.
        emitted: Tokens that an earlier attempt has already delivered; generation continues after them.
        echo: Send the prompt's text before the first generated token.
        created: Unix seconds at the sender, for queue-time metrics.
        trace: Names the request in every log line: the gateway's `x-request-id`. Two requests may have the same.
        chat: With `messages`: further variables of the chat template.
        suffix: With `text`: text after the output, for a model that supports fill-in-the-middle.
        add_special_tokens: With `text`: the tokenizer adds its own, such as one that begins every text.
        truncate_prompt_tokens: Number of the prompt's last tokens to use; -1: as many as leave room in the context
            for the output. With `pooling` the first ones are used, and -1 is as many as the model reads.
        cache_salt: Prompts share computed blocks only where their salts are equal.
        pooling: The answer is numbers made of the prompt, and nothing is generated: `sampling` does not apply.
        prediction: Text that the output probably resembles; it changes the speed at most, never the answer.
        traceparent: W3C's name of the span that this request is part of, when requests are traced.
        is_followed: Of a batch request: a client reads the text while it is written, so progress is recorded often.
        is_background: Of a batch request: a person waits for it, so workers compute it as they do interactive ones.
        cache_hints: How long its cached blocks stay useful; without influence on the answer.
        adapter: The adapter (LoRA) beside the model, by its name, or by its digest, as gateways do.
        left_out: Of a batch request: parameters of `sampling` that its sender leaves to the model's defaults.
        key, weight: The API key and its weight: waiting keys are served in proportion to their weights.
        kv_budget: How many of its tokens the KV cache keeps; None keeps all.
        evicted: Blocks that earlier attempts evicted by attention; this one repeats the evictions.
        probation: Tokens that this attempt has to produce until it is no longer suspected of killing its worker; 0 for
            a request without suspicion. A worker runs one request on probation at a time.
        ready: Location of the KV of its prompt, which the attempt before has computed.
    """

    id: bounds.RequestId
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    tenant: bounds.TenantName = "default"
    version: bounds.Version = PROTOCOL_VERSION
    epoch: bounds.Epoch = 0
    lane: Lane = "interactive"
    priority: bounds.Priority = 0
    deadline: bounds.UnixSeconds | None = None
    messages: Messages | None = None
    text: str | None = None
    token_ids: bounds.TokenIds | None = None
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    reply: bounds.ReplySubject | None = None
    emitted: bounds.TokenIds = ()
    echo: bool = False
    created: bounds.UnixSeconds = 0.0
    trace: Annotated[str, Meta(max_length=256)] | None = None
    prediction: str | None = None
    probation: bounds.NumOutputTokens = 0
    chat: ChatOptions | None = None
    pooling: Pooling | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: bounds.NumTruncatedTokens | None = None
    cache_salt: bounds.CacheSalt | None = None
    return_prompt_token_ids: bool = False
    traceparent: bounds.TraceParent | None = None
    is_followed: bool = False
    is_background: bool = False
    left_out: Annotated[tuple[DefaultedName, ...], Meta(max_length=16)] = ()
    key: bounds.KeyId = ""
    weight: bounds.Weight = 1.0
    media: Media = ()
    adapter: AdapterName | None = None
    cache_hints: CacheHints | None = None
    ready: KvReady | None = None
    kv_budget: KvBudget | None = None
    evicted: EvictedBlocks | None = None


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """One token with its log probability and, for a chosen token, the most likely alternatives."""

    token_id: int
    token: str
    # The plain name would mean the field itself when msgspec resolves the annotation.
    bytes: builtins.bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of one sequence.

    Attributes:
        cached_tokens: Prompt tokens found in the prefix cache.
        accepted_prediction_tokens: Generated tokens that were accepted drafts of speculative decoding.
        rejected_prediction_tokens: Draft tokens that were wrong, or came after a wrong one.
        evicted_tokens: Tokens that had left the KV cache when the last one was generated (`Request.kv_budget`).
        evicted_by: The policy by which they left; empty where none had.
    """

    prompt_tokens: bounds.NumTokens
    completion_tokens: bounds.NumTokens
    cached_tokens: bounds.NumTokens = 0
    accepted_prediction_tokens: bounds.NumTokens = 0
    rejected_prediction_tokens: bounds.NumTokens = 0
    evicted_tokens: bounds.NumTokens = 0
    evicted_by: Annotated[str, Meta(max_length=64)] = ""


class Finish(Struct, frozen=True, array_like=True):
    """Why a sequence ended. `handoff` means: not ended, send it to another worker.

    `error_param` names the request field at fault when `reason` is `failed` because of bad input (a 400 to the
    client), and `error_code` says why for machines; None with `failed` is a fault of ours (a 500). `stop` is the stop
    string or the stop token that ended the text, if one of the request's own did. `vector` is the answer to a request
    with `pooling`: numbers of 32 bits, little end first. `timing` is there when the sequence was computed to its end,
    `receipt` (what the attempt took) whatever its end. `ready` with `handoff`: the prompt is computed, and
    another worker is to go on.
    """

    reason: FinishReason
    usage: Usage | None = None
    error: str | None = None
    error_param: str | None = None
    error_code: str | None = None
    stop: str | int | None = None
    vector: bytes | None = None
    timing: Timing | None = None
    receipt: Receipt | None = None
    ready: KvReady | None = None


class Delta(Struct, frozen=True, array_like=True, gc=False):
    """The output of one step for one request.

    Attributes:
        seq: Index of the first token in `token_ids` among all tokens generated for the request, over all epochs.
            The receiver drops what it already has and treats a jump ahead as loss.
        token_ids: May be empty: the first delta of an epoch says which worker holds the request.
        text: Text that became certain in this step. It may lag behind `token_ids` while a UTF-8 character or a possible
            stop string is incomplete; the lag is a function of the tokens alone, so another worker continues exactly.
        prompt_logprobs: For the prompt's tokens, once, when asked for; None for the first, which has no condition.
        prompt_tokens: Length of the prompt in tokens, in the first delta of an epoch.
        in_reasoning: In the first delta of an epoch: the text begins inside the model's reasoning.
        evicted: Blocks evicted by attention since the previous delta, if any: no earlier token was affected.
    """

    id: str
    epoch: int
    seq: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_tokens: bounds.NumTokens | None = None
    in_reasoning: bool = False
    prompt_token_ids: tuple[int, ...] | None = None
    evicted: EvictedBlocks | None = None


class Frame(Struct, frozen=True, array_like=True, tag="frame"):
    """All deltas of one engine step for one reply subject."""

    worker: str
    step: int
    deltas: list[Delta]
    version: int = PROTOCOL_VERSION


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """A worker's state, every 200 ms. A step counter that stands still while `running > 0` means a dead worker.

    Attributes:
        waiting_tokens: Prompt tokens of the worker's requests that are not computed yet.
        prefill_rate: Prompt tokens per second, measured recently while prefilling; 0 while unknown.
        decode_rate: Generated tokens per second of a full batch, as last measured; 0 while unknown.
        queue_pending: Interactive requests left in the shared queue when the worker last pulled.
        knows_queue: Whether it has pulled, since it started and since it lost the queue, if it did.
        max_prompt_characters: A longer prompt cannot fit into the context; 0 while unknown.
        revision: Fingerprint of the model's files, and behind an @ their commit at the hub; answers differ with it.
        spec_decode_num_drafts: Times that a sequence verified drafts in a step; below, tokens verified, and accepted.
        last_pulled: Highest stream sequence of the interactive requests that it was sent: those before it are out, too.
        last_returned: The same of those that it has given back: that one, and those before it, may wait there again.
        last_resumed, last_resumed_returned: The same in the queue of resumed requests.
        chat_format: Name of the description in `shared.formats` of how the model writes reasoning and tool calls.
        sampling_defaults: Defaults in the model's files for parameters that a request omits; None without any.
        num_reconnects: Connections to NATS that the worker has made anew: frames may have been lost with each before.
        features, adapters: What it understands that earlier versions do not, and has named; gateways send nothing else.
        prefixes: Prompt prefixes that it holds, and requests waiting for a holder; None: it does not take part.
        roles: Its part in computing prompts and answers on different workers; None: it does both.
        is_ending: It drains and ends then; `draining` without it: it is cordoned, or withdrawn.
    """

    worker: bounds.PeerName
    model: bounds.PeerName
    step: bounds.Counter
    running: bounds.NumRequests
    waiting: bounds.NumRequests
    waiting_tokens: bounds.NumTokens
    free_blocks: bounds.NumBlocks
    total_blocks: bounds.NumBlocks
    block_size: bounds.BlockSize
    max_model_len: bounds.NumTokens
    max_num_seqs: bounds.NumRequests
    prefill_rate: bounds.TokensPerSecond
    decode_rate: bounds.TokensPerSecond
    queue_pending: bounds.NumRequests
    knows_queue: bool = True
    draining: bool = False
    pid: bounds.ProcessId = 0
    started: bounds.UnixSeconds = 0.0
    revision: bounds.Revision = ""
    version: bounds.Version = PROTOCOL_VERSION
    spec_decode_num_drafts: bounds.Counter = 0
    spec_decode_num_draft_tokens: bounds.Counter = 0
    spec_decode_num_accepted_tokens: bounds.Counter = 0
    last_pulled: bounds.Counter = 0
    last_returned: bounds.Counter = 0
    last_resumed: bounds.Counter = 0
    last_resumed_returned: bounds.Counter = 0
    max_prompt_characters: bounds.NumTokens = 0
    chat_format: Annotated[str, Meta(max_length=64)] = ""
    tasks: Annotated[tuple[Task, ...], Meta(max_length=16)] = ("generate",)
    metrics: WorkerMetrics | None = None
    sampling_defaults: SamplingDefaults | None = None
    num_reconnects: bounds.Counter = 0
    features: Features = ()
    prefixes: PrefixNews | None = None
    adapters: AdapterBeats = ()
    services: Services = {}
    roles: RoleNews | None = None
    resident_adapters: ResidentAdapters = b""
    is_ending: bool = False


class GatewayHeartbeat(Struct, frozen=True, kw_only=True, tag="gateway"):
    """A gateway's state, every second: other gateways add its queue to theirs, workers drop its requests when it dies.

    Attributes:
        unclaimed: Requests published that no worker has answered yet, and the prompt tokens in them.
        started: When it began: the oldest gateway shows the figures of the fleet to Prometheus.
        awaited: By model, requests that workers have claimed and produced nothing for, and their tokens, or None.
        unclaimed_of: `unclaimed` and `unclaimed_tokens` by model; None from gateways that do not separate models.
        features: Protocol features that the gateway supports; others write nothing that needs more.
        services: By model, how far tenants were ahead at workers that are silent now.
        adapter_names: How far the names of adapters were read; None from earlier versions.
    """

    gateway: bounds.PeerName
    unclaimed: bounds.NumRequests
    unclaimed_tokens: bounds.NumTokens
    version: bounds.Version = PROTOCOL_VERSION
    started: bounds.UnixSeconds = 0.0
    awaited: Awaited | None = None
    unclaimed_of: Awaited | None = None
    features: Features = ()
    services: ServicesOfModels = {}
    adapter_names: NamesRead | None = None


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop these requests, queued or running: every attempt, or those up to an epoch.

    Attributes:
        keep: The worker that this is not meant for, because it holds the attempt that counts.
        tenant: Whose jobs these are; None for interactive requests.
    """

    ids: tuple[str, ...]
    epoch: int | None = None
    version: int = PROTOCOL_VERSION
    keep: str | None = None
    tenant: bounds.TenantName | None = None


class BatchResult(Struct, frozen=True, kw_only=True, tag="result"):
    """The outcome of a batch request, stored once in the results stream as JSON.

    `vector` (in base64), `error_param` and `error_code` are those of `Finish`, `chat_format` is that of `Heartbeat`.
    `total_logprob` adds up its tokens' log probabilities. `device_s` and `receipt` are those of the last attempt.
    """

    id: str
    model: str
    tenant: str
    text: str
    finish: FinishReason
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    attempt: int = 1
    worker: str = ""
    created: float = 0.0
    completed: float = 0.0
    version: int = PROTOCOL_VERSION
    cached_tokens: int = 0
    in_reasoning: bool = False
    vector: bytes | None = None
    chat_format: str = ""
    error_param: str | None = None
    error_code: str | None = None
    total_logprob: float | None = None
    device_s: float = 0.0
    evicted_tokens: int = 0
    receipt: Receipt | None = None
    evicted_by: str = ""


UNDECODABLE = (msgspec.MsgspecError, RecursionError, ValueError)
"""What a decoder raises: besides msgspec's own, nesting that is too deep, and text that is not valid Unicode."""
_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_request_json_decoder = msgspec.json.Decoder(Request)


def encode(message: Struct) -> bytes:
    """Encode any wire message as msgpack."""
    return _encoder.encode(message)


def encode_request(request: Request) -> bytes:
    """Encode a request: as JSON where it has fields that workers of earlier versions must refuse, and not ignore."""
    has_news = request.media or request.sampling.watermark or request.kv_budget
    return msgspec.json.encode(request) if has_news else _encoder.encode(request)


def decode_request(payload: bytes) -> Request:
    """Decode a request from msgpack, or from JSON when it starts with `{`.

    Raises:
        msgspec.DecodeError: The bytes are neither.
        msgspec.ValidationError: A field has a wrong type or is out of range; the message names it.
        UnknownFieldError: The JSON has a field that nothing reads.
    """
    if payload[:1] == b"{":
        request = _request_json_decoder.decode(payload)
        check_fields(msgspec.json.decode(payload), Request)
        return request
    return _request_decoder.decode(payload)
