"""One id from the client's header through the queue, and none that could do harm."""

from __future__ import annotations

import pytest

from gateway.http1.head import request_id_of
from shared.messages import Finish
from tests.gateway.gateway_process import GatewayProcess
from tests.gateway.raw_client import RawClient
from tests.gateway.shared_gateway import gateway, nats_url
from tests.gateway.wire_worker import WireWorker, until

__all__ = ["gateway", "nats_url"]


@pytest.mark.parametrize("value", [b"a", b"trace-1.2:3/4@x_y=+", b"0" * 128])
def test_id_that_a_client_chose_is_kept(value: bytes) -> None:
    assert request_id_of([(b"host", b"t"), (b"x-request-id", value)]) == value.decode()


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"0" * 129],
        [b"a", b"b"],
        [b"a\r\nset-cookie: x"],
        [b"a\nb"],
        [b"a b"],
        [b'"a"'],
        [b"\xff"],
        [b"a\x00"],
        [b"a;b"],
    ],
)
def test_id_that_will_not_do_is_replaced(values: list[bytes]) -> None:
    made = request_id_of([(b"x-request-id", value) for value in values])
    assert made.startswith("req_")
    assert len(made) == 28


def test_ids_of_our_own_cannot_be_guessed() -> None:
    ids = {request_id_of([]) for _ in range(1000)}
    assert len(ids) == 1000
    # No two share more than chance allows, so there is no counter and no time in them.
    assert len({made[:12] for made in ids}) > 990


async def test_one_id_goes_from_the_header_through_the_queue_to_answer_and_log(
    gateway: GatewayProcess, worker: WireWorker, client: RawClient
) -> None:
    body = {"model": worker.model, "prompt": ["a", "b"], "max_tokens": 4}
    client.post("/v1/completions", body, "X-Request-Id: from-the-client-7")
    requests = [await worker.next_request() for _ in range(2)]
    assert {request.trace for request in requests} == {"from-the-client-7"}
    # Wire ids are our own: two clients with one id do each other no harm.
    assert len({request.id for request in requests}) == 2
    assert not any("from-the-client" in request.id for request in requests)
    await worker.end(requests[0], 0, Finish("failed", error="broken here"))
    status, headers = await client.head()
    assert (status, headers["x-request-id"]) == (500, "from-the-client-7")
    await until(lambda: "broken here" in gateway.log)
    (line,) = [line for line in gateway.log.splitlines() if "broken here" in line]
    assert "request_id=from-the-client-7" in line


async def test_id_of_a_client_that_chose_none_is_the_same_everywhere(worker: WireWorker, client: RawClient) -> None:
    client.post("/v1/completions", {"model": worker.model, "prompt": "a", "max_tokens": 1})
    request = await worker.next_request()
    await worker.end(request, 0)
    _, headers = await client.head()
    assert headers["x-request-id"] == request.trace
    assert request.trace is not None
    assert request.trace.startswith("req_")


async def test_long_id_is_replaced_on_every_route(worker: WireWorker, client: RawClient) -> None:
    for path in ("/v1/completions", "/tokenize", "/nowhere"):
        client.post(path, {"model": "no-such-model", "prompt": "x"}, f"X-Request-Id: {'x' * 500}")
        status, headers = await client.head()
        assert status == 404
        assert headers["x-request-id"].startswith("req_")
        await client.reader.readexactly(int(headers["content-length"]))


async def test_chosen_id_is_answered_on_every_route(worker: WireWorker, client: RawClient) -> None:
    for path in ("/v1/completions", "/tokenize", "/nowhere"):
        client.post(path, {"model": "no-such-model", "prompt": "x"}, "X-Request-Id: mine")
        _, headers = await client.head()
        assert headers["x-request-id"] == "mine"
        await client.reader.readexactly(int(headers["content-length"]))
