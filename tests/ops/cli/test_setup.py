import json
from collections.abc import Callable

import nats

from ops.stack.commands import NATS_CONFIG, NATS_ROLES, nats_password_variable
from ops.stack.ports import free_port
from tests.ops.cli.command import headrace
from tests.servers import NatsServer

STREAMS = {"HR_INTERACTIVE", "HR_BATCH_default", "HR_RESULTS", "HR_DEAD"}


async def test_setup_creates_the_streams_and_may_be_repeated(start_nats: Callable[..., NatsServer]) -> None:
    server = start_nats()
    for _ in range(2):
        done = headrace("setup", "--nats-url", server.url)
        assert (done.returncode, done.stderr) == (0, "")
    client = await nats.connect(server.url)
    assert {stream.config.name for stream in await client.jetstream().streams_info()} == STREAMS
    await client.close()


def test_setup_by_a_role_that_may_not_is_one_line_and_exit_code_2(
    start_nats: Callable[..., NatsServer], monkeypatch
) -> None:
    for role in NATS_ROLES:
        monkeypatch.setenv(nats_password_variable(role), f"password{role}")
    server = start_nats("-c", str(NATS_CONFIG))
    done = headrace("setup", "--nats-url", server.url, "--nats-user", "batch", "--nats-password", "passwordbatch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("headrace: ")
    assert "Traceback" not in done.stderr


def test_setup_without_a_server_is_one_line_and_exit_code_2() -> None:
    done = headrace("setup", "--nats-url", f"nats://127.0.0.1:{free_port()}", "--timeout-s", "0.5")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "did not answer within 0.5 s" in done.stderr


def test_setup_is_in_the_audit_log_without_the_password(start_nats: Callable[..., NatsServer]) -> None:
    url = start_nats().url.replace("nats://", "nats://ann:secret@")
    done = headrace("setup", "--nats-url", url, "--audit-file", "-")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("{")]
    entry = json.loads(line)
    assert (entry["action"], entry["outcome"], entry["who"]["nats_user"]) == ("setup", "done", "ann")
    assert "secret" not in line
