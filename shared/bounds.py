"""The bounds of every parameter of a request and of a heartbeat, once, for the gateway's JSON and for the wire.

Each type has a lower and an upper bound. So it refuses NaN, the infinities, and integers that do not fit 64 bits,
whichever encoding they come in: msgspec compares in such a way that NaN is within no bound.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

MAX_NAME_BYTES = 128
MAX_MESSAGES = 4096
MAX_PROMPT_TOKENS = 1 << 20
MAX_SEQUENCES = 128
MAX_INPUTS = 2048
MAX_DIMENSIONS = 1 << 17
MAX_INSTRUCTION_CHARACTERS = 1 << 14
MAX_STOPS = 16
MAX_TOOLS = 512
MAX_GRAMMAR_CHARACTERS = 4 << 20
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 64
MAX_ALLOWED_TOKENS = 1 << 16
MAX_SALT_CHARACTERS = 512
MAX_BIASES = 1024
MAX_OUTPUT_TOKENS = 10_000_000
MAX_TIMEOUT_S = 86_400.0
MAX_IMAGES = 64
MAX_IMAGE_BYTES = 64 << 20
MAX_IMAGE_SIDE = 1 << 15
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKENS = 128
MAX_TOKEN_ID = 2**31 - 1
MAX_EPOCH = 2**31 - 1
MAX_QUEUED_REQUESTS = 10_000_000
MAX_QUEUED_TOKENS = 2**40
MAX_COUNTER = 2**63 - 1
MAX_TOKENS_PER_S = 1e12
MAX_DURATION_S = 1e9
MAX_UNIX_S = 253_402_300_799.0
"""The end of the year 9999."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_PROMPT_TOKENS)]
AllowedTokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
NumOutputTokens = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)]
# -1: as many as fit into the context.
NumTruncatedTokens = Annotated[int, Meta(ge=-1, le=MAX_PROMPT_TOKENS)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
# Smaller ones turn a logit into an infinity, which is not a logit any more.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Biases = Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
Weight = Annotated[float, Meta(ge=0.01, le=100.0)]
KeyId = Annotated[str, Meta(max_length=64)]
# Of a batch job: otherwise any publisher could go before the jobs of all other tenants.
MAX_JOB_PRIORITY = 0
MAX_JOB_WEIGHT = 1.0
Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
TimeoutSeconds = Annotated[float, Meta(ge=0.001, le=MAX_TIMEOUT_S)]
UnixSeconds = Annotated[float, Meta(ge=0.0, le=MAX_UNIX_S)]
Version = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TenantName = Annotated[str, Meta(min_length=1, max_length=128)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+\Z")]
# That of a response and of its background job: made by a gateway, random.
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
# W3C's name of a span: version, trace, span, flags.
TraceParent = Annotated[str, Meta(max_length=64, pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
ReplySubject = Annotated[str, Meta(max_length=512)]
NumRequests = Annotated[int, Meta(ge=0, le=MAX_QUEUED_REQUESTS)]
NumTokens = Annotated[int, Meta(ge=0, le=MAX_QUEUED_TOKENS)]
NumBlocks = Annotated[int, Meta(ge=0, le=2**31 - 1)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 20)]
Counter = Annotated[int, Meta(ge=0, le=MAX_COUNTER)]
TokensPerSecond = Annotated[float, Meta(ge=0.0, le=MAX_TOKENS_PER_S)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_DURATION_S)]
ProcessId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PeerName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES, pattern=r"^[^\x00]+\Z")]
Revision = Annotated[str, Meta(max_length=256)]
