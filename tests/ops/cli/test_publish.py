import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from click.testing import CliRunner

from ops.cli import publish
from ops.cli.batch_client import BatchClient
from ops.cli.publish import PublishConfig
from ops.examples import batch_publish
from shared.errors import ConfigError, DependencyError, HeadraceError
from shared.messages import Request
from shared.nats_files import NatsFiles
from shared.subjects import encode_name
from tests.integration.system import System
from tests.ops.cli.command import headrace
from tests.servers import NatsServer


def _results(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines()]


def test_prompt_is_published_and_its_result_awaited(state_dir: Path) -> None:
    done = headrace("publish", "def f():", "--wait", "--max-tokens", "4", "--state-dir", str(state_dir))
    assert done.returncode == 0, done.stderr
    (result,) = _results(done.stdout)
    assert (result["finish"], result["completion_tokens"], result["tenant"]) == ("length", 4, "default")
    assert result["text"]


def test_file_of_requests_gives_a_result_each(state_dir: Path, tmp_path: Path) -> None:
    requests = [
        {"id": "one", "text": "a", "sampling": {"max_tokens": 2}},
        {"id": "two", "messages": [{"role": "user", "content": "b"}], "tenant": "default"},
        {"id": "three", "token_ids": [1, 2, 3]},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(json.dumps(request) for request in requests) + "\n\n")
    options = ["--file", str(file), "--wait", "--max-tokens", "3", "--state-dir", str(state_dir)]
    done = headrace("publish", *options)
    assert done.returncode == 0, done.stderr
    results = {result["id"]: result for result in _results(done.stdout)}
    assert {key: result["completion_tokens"] for key, result in results.items()} == {"one": 2, "two": 3, "three": 3}


def test_same_request_published_again_is_answered_from_its_stored_result(state_dir: Path) -> None:
    request = json.dumps({"id": "again", "text": "a", "sampling": {"max_tokens": 2}})
    options = ["publish", "--file", "-", "--wait", "--state-dir", str(state_dir)]
    first, second = headrace(*options, given=request), headrace(*options, given=request)
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert _results(first.stdout) == _results(second.stdout)


def test_without_wait_the_subject_of_the_result_is_told(state_dir: Path) -> None:
    done = headrace("publish", "x", "--state-dir", str(state_dir))
    (told,) = _results(done.stdout)
    assert told["result"] == f"hr.result.default.{told['id']}"


def test_jobs_of_a_tenant_that_is_not_the_user_s_are_refused_in_one_line(state_dir: Path) -> None:
    for options in ([], ["--wait"]):
        done = headrace("publish", "x", "--tenant", "acme", "--state-dir", str(state_dir), *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "NATS does not let this user publish jobs of the tenant 'acme'" in done.stderr
        assert "`headrace setup --tenants acme` makes it and --tenant uses it" in done.stderr
        assert "elsewhere `headrace tenant` makes it" in done.stderr


def test_tenant_without_a_queue_is_told_who_makes_one(start_nats: Callable[..., NatsServer]) -> None:
    done = headrace("publish", "x", "--tenant", "new", "--model-name", "m", "--nats-url", start_nats().url)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "tenant 'new' has no batch queue" in done.stderr
    assert "headrace setup --tenants" in done.stderr


def test_bad_requests_are_one_line_before_anything_is_connected() -> None:
    for line, message in [
        (
            '{"text": "a", "sampling": {"temperature": 9}}',
            "--file: standard input, line 1: 'sampling.temperature' is invalid: expected number <= 2.0\n",
        ),
        ('{"text": "a", "token_ids": [1]}', "give one of text, messages and token_ids"),
        ('{"text": "a", "max_tokens": 3}', """'max_tokens' belongs into "sampling": {"max_tokens": ...}"""),
        ('{"text": "a", "sampling": {"max_token": 3}}', "no field 'max_token'; did you mean 'max_tokens'?"),
        ('{"custom_id": "a"}', "the request has no field 'custom_id'; did you mean 'id'?"),
        ('{"text": "a", "sampling": [1]}', "'sampling' is invalid: expected object"),
        ('{"text": "a", "tenant": ""}', "line 1: 'tenant' is invalid: expected string of length >= 1"),
        (
            '{"text": "a", "sampling": {"logit_bias": {"x": 1}}}',
            "A key of 'sampling.logit_bias' is invalid: expected integer, got string",
        ),
        ('{"messages": [{"role": "user"}]}', "'messages.[0].content' is missing"),
        ('{"text": "a", "priority": 5}', "priority is 5, and that of a job is at most 0; give jobs that can wait"),
        ("{", "line 1: not JSON: "),
        ("[" * 100_000, "line 1: not JSON: maximum recursion depth"),
        ('{"text": "a"}\n{"text": "\\ud800"}', "line 2: a text is not valid Unicode"),
        ("[1]", "line 1: not a JSON object"),
        ('{"text": "a", "tenant": "a\\u0000b"}', "tenant: name"),
        (json.dumps({"text": "a", "model": "é" * 65}), "model: name"),
        ('{"text": "a", "reply": "$JS.ACK.x"}', "reply must begin with 'hr.reply.default.'"),
    ]:
        given = ["--file", "-", "--model-name", "m", "--nats-url", "nats://127.0.0.1:1"]
        done = CliRunner().invoke(publish.command, given, input=line)
        assert isinstance(done.exception, HeadraceError)
        assert (done.stdout, str(done.exception).count("\n")) == ("", 0)
        assert message in f"{done.exception}\n"


def test_all_bad_lines_are_told_at_once(tmp_path: Path) -> None:
    lines = [
        '{"text": "good", "id": "a"}',
        '{"text": 5}',
        "",
        "{",
        '{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {}}',
        '{"text": "good", "id": "a"}',
    ]
    file = tmp_path / "jobs"
    options = ["publish", "--file", str(file), "--model-name", "m", "--nats-url", "nats://127.0.0.1:1"]
    file.write_text("\n".join(lines))
    done = headrace(*options)
    head, *told = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert head == f"headrace: --file: {file}: 4 of 5 lines are wrong, and nothing is published:"
    assert [line[:9] for line in told] == ["  line 2:", "  line 4:", "  line 5:", "  line 6:"]
    assert "'text' is invalid" in told[0]
    assert "not JSON" in told[1]
    assert "`headrace batch submit` takes" in told[2]
    assert "id 'a' is that of line 1 too" in told[3]
    file.write_text("{\n" * 30)
    told = headrace(*options).stderr.splitlines()
    assert (len(told), told[-1]) == (22, "  and 10 more")


def test_served_models_are_named_where_nats_is_given_by_its_url(cli_system: System, state_dir: Path) -> None:
    nats = ["--state-dir", str(state_dir), "--nats-url", cli_system.info["nats_url"]]
    done = headrace("publish", "x", "--model-name", "unserved", "--queue-unserved", *nats)
    assert done.stderr.endswith("until one does; served: headrace-demo\n")


def test_jobs_of_a_model_that_nobody_serves_are_refused_whole(state_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text('{"id": "served", "text": "x"}\n{"id": "not", "text": "x", "model": "unserved"}\n')
    done = headrace("publish", "--file", str(tmp_path / "jobs"), "--state-dir", str(state_dir))
    assert (done.returncode, done.stdout) == (2, "")
    told = "no worker serves 'unserved'; served: headrace-demo; with --queue-unserved its jobs wait for one\n"
    assert done.stderr.endswith(told)


def test_waiting_that_is_stopped_says_what_becomes_of_the_jobs(
    cli_system: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, "_publish", stopped)
    config = PublishConfig(nats_url=cli_system.info["nats_url"], model_name=cli_system.model, wait=True)
    assert publish.run(config, "x") == 130
    assert "stopped; published requests still run" in capsys.readouterr().err


def test_results_that_are_missing_are_named_with_what_happens_to_their_jobs(state_dir: Path) -> None:
    options = ["--model-name", "unserved", "--queue-unserved", "--wait", "--timeout-s", "0.5"]
    options += ["--state-dir", str(state_dir)]
    done = headrace("publish", "--file", "-", *options, given='{"id": "waiting", "text": "a"}')
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 2)
    assert done.stderr.startswith(
        "headrace: no worker serves 'unserved' now; its jobs wait in the queue until one does; served: headrace-demo\n"
    )
    assert "1 of 1 results are missing, such as hr.result.default.waiting; " in done.stderr
    assert "until a worker serves their model" in done.stderr


def test_request_without_a_model_where_no_worker_is_heard_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_served_models", lambda config, url, running: {})
    with pytest.raises(ConfigError, match="names no model, and no worker is heard whose model it could be"):
        publish.run(PublishConfig(nats_url="nats://127.0.0.1:1"), "x")


def test_request_without_a_model_where_several_are_served_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(publish, "_served_models", lambda config, url, running: {"one": "one", "two": "two"})
    file = tmp_path / "lines.jsonl"
    file.write_text('{"text": "x"}')
    with pytest.raises(ConfigError, match="line 1 names no model, and 2 models are served: one, two; name one"):
        publish.run(PublishConfig(nats_url="nats://127.0.0.1:1", file=file), None)


@pytest.mark.parametrize("arguments", [{"model_name": "chat"}, {}])
def test_alias_is_resolved_and_is_no_second_model(arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    published = []

    async def take(config: PublishConfig, url: str, requests: list[Request]) -> int:
        published.extend(requests)
        return 0

    monkeypatch.setattr(publish, "_served_models", lambda config, url, running: {"chat": "demo", "demo": "demo"})
    monkeypatch.setattr(publish, "_publish", take)
    assert publish.run(PublishConfig(nats_url="nats://127.0.0.1:1", **arguments), "x") == 0  # type: ignore[arg-type]
    assert [request.model for request in published] == ["demo"], "what workers take"


async def test_results_that_are_not_answers_are_counted_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def results(*_: object) -> AsyncIterator[dict[str, object]]:
        for place, finish in enumerate(("length", "cancelled", "cancelled", "expired")):
            yield {"id": str(place), "finish": finish}

    async def itself(client: BatchClient, *_: object) -> BatchClient:
        return client

    monkeypatch.setattr(BatchClient, "results", results)
    monkeypatch.setattr(BatchClient, "__aenter__", itself)
    monkeypatch.setattr(BatchClient, "__aexit__", itself)
    requests = [Request(id=str(place), model="m", lane="batch", text="x") for place in range(4)]
    assert await publish._publish(PublishConfig(wait=True), "nats://127.0.0.1:1", requests) == 1
    assert capsys.readouterr().err == "headrace: 3 of 4 results are not answers (2 cancelled, 1 expired)\n"


def test_ready_file_that_is_damaged_or_of_another_version_is_one_line(tmp_path: Path) -> None:
    texts = {'{"url": "http://127.0.0.1:1"}': "it is not of this version", "{": "it is not JSON"}
    for text, why in texts.items():
        (tmp_path / "ready.json").write_text(text)
        done = headrace("publish", "x", "--state-dir", str(tmp_path))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"ready.json cannot be read: {why}; start `headrace up` anew" in done.stderr


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
    assert (done.returncode, done.stderr) == (1, "usage: python batch_publish.py NATS_URL MODEL PROMPT\n")
    source = Path(batch_publish.__file__).read_text()
    assert "shared" not in source.replace("shared.messages.Request", "")


async def test_waiting_without_results_is_told(cli_system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.cli.batch_client.SILENCE_S", 0.1)
    monkeypatch.setattr("ops.cli.batch_client._LOOK_EVERY_S", 0.05)
    told: list[str] = []
    request = Request(id="silent", model="nobody", text="x", lane="batch")
    async with BatchClient(cli_system.info["nats_url"], None, None, NatsFiles(), told.append) as client:
        with pytest.raises(DependencyError, match="1 of 1 results are missing"):
            await anext(client.results([request], 0.6))
    (text,) = told
    assert text.startswith("no result for 0 s, 1 of 1 are missing, of nobody; jobs wait in the queue until")
    assert text.endswith("GET /v1/models of a gateway lists the models that are served")


async def test_lost_connection_is_told_once_and_its_return_too(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    told: asyncio.Queue[str] = asyncio.Queue()
    async with BatchClient(server.url, None, None, NatsFiles(), told.put_nowait):
        server.kill()
        lost = await asyncio.wait_for(told.get(), 20)
        # As many attempts as would each have been told of.
        await asyncio.sleep(0.5)
        server.start()
        back = await asyncio.wait_for(told.get(), 20)
    place = server.url.removeprefix("nats://")
    assert (lost, back) == (f"the connection to NATS at {place} is lost; waiting for it to come back", "NATS is back")
    assert told.empty()


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
    await batch_publish.main("nats://one:1", "a/b", "the prompt")
    subject, data = client.jetstream.return_value.publish.call_args[0]
    request = msgspec.json.decode(data, type=Request)
    assert subject == "hr.req.a_2fb.batch.default"
    assert (request.model, request.text, request.lane) == ("a/b", "the prompt", "batch")
    client.subscribe.assert_called_once_with(f"hr.result.default.{request.id}")
    assert json.loads(capsys.readouterr().out) == {"finish": "stop"}
