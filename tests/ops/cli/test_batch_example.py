"""The example of a program that publishes a job."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from ops.examples import batch_publish
from shared.messages import Request
from shared.subjects import encode_name
from tests.integration.system import System


def test_documented_example_runs_with_nothing_but_nats_py(cli_system: System) -> None:
    command = [sys.executable, batch_publish.__file__, cli_system.info["nats_url"], cli_system.model, "def f():"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    # The example does not say when it made the job: the queue knows when it stored it.
    assert (result["finish"], abs(result["completed"] - result["created"]) < 60) == ("length", True)
    wrong_password = re.sub(r"batch:[^@]*@", "batch:wrong@", command[2])
    done = subprocess.run([*command[:2], wrong_password, *command[3:]], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Authorization Violation" in done.stderr) == (1, True)
    done = subprocess.run(command[:4], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "usage: python batch_publish.py NATS_URL MODEL PROMPT [TENANT]\n")
    source = Path(batch_publish.__file__).read_text()
    assert "shared" not in source.replace("shared.messages.Request", "")


@pytest.mark.parametrize("name", ["model", "org/model-1.5_b", "caf\u00e9 \U0001f600", "a.b*>"])
def test_example_encodes_names_as_the_queue_does(name: str) -> None:
    assert batch_publish.token(name) == encode_name(name)


async def test_example_publishes_the_prompt_for_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client, result = AsyncMock(), AsyncMock()
    result.next_msg.return_value.data = b'{"finish": "stop"}'
    client.subscribe.return_value = result
    client.jetstream = Mock(return_value=AsyncMock())
    monkeypatch.setattr(batch_publish.nats, "connect", AsyncMock(return_value=client))
    await batch_publish.main("nats://one:1", "a/b", "the prompt", "c d")
    subject, data = client.jetstream.return_value.publish.call_args[0]
    request = msgspec.json.decode(data, type=Request)
    assert subject == "hr.req.a_2fb.batch.c_20d"
    assert (request.model, request.text, request.lane, request.tenant) == ("a/b", "the prompt", "batch", "c d")
    client.subscribe.assert_called_once_with(f"hr.result.c_20d.{request.id}")
    assert json.loads(capsys.readouterr().out) == {"finish": "stop"}
