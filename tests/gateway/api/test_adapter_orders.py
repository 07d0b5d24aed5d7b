"""Bodies of an operator's calls about adapters: what cannot be is refused, with the field and what is allowed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.api.adapter_orders import LoadBody, UnloadBody
from gateway.api.schemas.decoding import decode_typed
from gateway.errors import ApiError
from shared.adapter_store import MAX_ADAPTER_BYTES, MAX_TOLD_RANK

DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("struct", "fields", "param", "allowed"),
    [
        (LoadBody, {"lora_content": [DIGEST, 8, 10**30]}, "lora_content.[2]", f"<= {MAX_TOLD_RANK}"),
        (LoadBody, {"lora_content": [DIGEST, 8, -1]}, "lora_content.[2]", ">= 0"),
        (LoadBody, {"lora_content": [DIGEST, 10**30]}, "lora_content.[1]", f"<= {MAX_ADAPTER_BYTES}"),
        (LoadBody, {"lora_content": ["A" * 64, 8]}, "lora_content.[0]", "matching regex"),
        (LoadBody, {"lora_path": "a\0b"}, "lora_path", "matching regex"),
        (LoadBody, {"lora_path": "a" * 4097}, "lora_path", "length <= 4096"),
        (LoadBody, {"base_model_name": "m" * 129}, "base_model_name", "length <= 128"),
        (UnloadBody, {"base_model_name": "m" * 129}, "base_model_name", "length <= 128"),
        (UnloadBody, {"lora_int_id": 10**30}, "lora_int_id", f"<= {2**63 - 1}"),
    ],
)
def test_field_beyond_its_limits_is_a_400_that_names_both(
    struct: type[msgspec.Struct], fields: dict[str, Any], param: str, allowed: str
) -> None:
    with pytest.raises(ApiError) as raised:
        decode_typed(struct, json.dumps({"lora_name": "a", **fields}).encode())
    assert (raised.value.status, raised.value.param) == (400, param)
    assert allowed in raised.value.message
