"""Baselines are of these prompts: one that changes makes every baseline useless."""

from __future__ import annotations

import hashlib
import json

from ops.golden.prompts import default_prompts


def test_prompts_are_the_same_everywhere_and_always() -> None:
    digest = hashlib.sha256(json.dumps(default_prompts()).encode()).hexdigest()
    assert digest == "7d5494ca14bb41c8309229d3c80555d0369a637e9aec4fee3a4a0a9e19ebace7"
