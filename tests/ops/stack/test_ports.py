import os
import re
import socket

import pytest

from ops.stack.ports import claim_port, free_port, is_free, port_holder
from shared.errors import ConfigError


@pytest.fixture
def taken_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_free_port_is_free_and_outside_the_range_of_outgoing_connections() -> None:
    port = free_port()
    assert is_free(port)
    assert 10_000 <= port < 30_000


def test_taken_port_is_refused_with_its_holder_and_an_offer_that_is_free(taken_port: int) -> None:
    with pytest.raises(ConfigError) as refusal:
        claim_port(taken_port)
    message = str(refusal.value)
    assert f"port {taken_port} is taken by" in message
    assert f"(pid {os.getpid()})" in message
    offer = re.search(r"try (\d+)", message)
    assert offer is not None
    assert claim_port(int(offer[1])) == int(offer[1])


def test_port_shared_with_reuseport_counts_as_taken() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not is_free(server.getsockname()[1])


def test_port_zero_claims_a_free_one_and_a_free_port_itself() -> None:
    port = claim_port(0)
    assert claim_port(port) == port


def test_free_port_and_that_of_a_client_have_no_holder(taken_port: int) -> None:
    assert port_holder(free_port()) is None
    with socket.create_connection(("127.0.0.1", taken_port)) as client:
        assert port_holder(client.getsockname()[1]) is None
