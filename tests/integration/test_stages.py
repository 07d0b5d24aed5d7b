"""A worker of two ranks answers as one process does, also behind the death of one: stages, or ranks that share tokens
or divide sequences.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ops.stack.child import children_of
from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 40, "logprobs": 2},
    {"prompt": "import os\n", "temperature": 0.9, "seed": 5, "top_p": 0.9, "max_tokens": 40},
    {"prompt": "class A:\n", "seed": 6, "max_tokens": 40, "extra_body": {"guided_json": SCHEMA}},
    {"prompt": ["for i in range(", "while "], "seed": 7, "max_tokens": 30, "frequency_penalty": 0.5},
)


def texts(system: System) -> list[str]:
    client = system.client(default_headers={"Cache-Control": "no-cache"})
    answers = [client.completions.create(model=system.model, **body) for body in BODIES]
    return [choice.text for answer in answers for choice in answer.choices]


SHARING = ("--tensor-parallel-size", "2", "--decode-context-parallel-size", "2")
DIVIDING = ("--tensor-parallel-size", "2", "--enable-dp-attention")


@pytest.mark.parametrize("options", [("--pipeline-parallel-size", "2"), SHARING, DIVIDING])
def test_two_ranks_answer_as_one_process(options: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with running_system(tmp_path / "one", "--num-threads", "1") as one:
        expected = texts(one)
    with running_system(tmp_path / "two", "--num-threads", "1", *options) as two:
        assert texts(two) == expected
        (worker,) = two.info["pids"]["worker"]
        (stage,) = [pid for pid in children_of(worker) if b"ranks.member" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(stage, signal.SIGKILL)
        # Until then nobody serves the model.
        wait_for(lambda: "the group of ranks serves again" in two.log.read_text(), 60)
        assert texts(two) == expected
