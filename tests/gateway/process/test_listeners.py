"""The sockets that gateway processes share: bound once, listening when a process serves."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.config import GatewayConfig
from gateway.process import listeners as listeners_module
from gateway.process.listeners import (
    RESERVED_FILES,
    Listeners,
    affordable_connections,
    bind_listeners,
    return_freed_memory,
    url_of,
)
from shared.errors import ConfigError


@contextlib.contextmanager
def bound(**settings: Any) -> Iterator[Listeners]:
    with contextlib.closing(bind_listeners(GatewayConfig(port=settings.pop("port", 0), **settings))) as listeners:
        yield listeners


def port(listener: socket.socket) -> int:
    number: int = listener.getsockname()[1]
    return number


def is_shared(listener: socket.socket) -> bool:
    return listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) != 0


def can_connect(listener: socket.socket) -> bool:
    try:
        socket.create_connection(listener.getsockname()[:2], timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_each_process_has_a_socket_of_the_same_port_and_all_share_the_operators() -> None:
    with bound(processes=3, operator_port=0, operator_host="127.0.0.2") as listeners:
        assert len({listener.fileno() for listener in listeners.public}) == 3
        assert len({port(listener) for listener in listeners.public}) == 1
        assert all(map(is_shared, listeners.public))
        assert listeners.operator is not None
        assert listeners.operator.getsockname()[0] == "127.0.0.2"
        assert not is_shared(listeners.operator)
        assert listeners.sockets == [*listeners.public, listeners.operator]
        assert listeners.url == f"http://127.0.0.1:{port(listeners.public[0])}"


def test_port_of_one_process_is_its_own_and_there_may_be_no_operators() -> None:
    with bound(tls_cert_file=Path("cert.pem")) as listeners:
        assert listeners.operator is None
        assert listeners.sockets == [*listeners.public]
        assert [is_shared(listener) for listener in listeners.public] == [False]
        assert listeners.url.startswith("https://127.0.0.1:")


def test_sockets_listen_refuse_and_listen_again() -> None:
    with bound(processes=2, operator_port=0) as listeners:
        assert listeners.operator is not None
        both = (listeners.public[0], listeners.operator)
        assert [can_connect(each) for each in both] == [False, False]
        listeners.listen()
        assert [can_connect(each) for each in both] == [True, True]
        listeners.refuse()
        assert [can_connect(each) for each in both] == [False, False]
        listeners.listen()
        assert [can_connect(each) for each in both] == [True, True]
        listeners.close()
        assert {each.fileno() for each in listeners.sockets} == {-1}


@pytest.mark.parametrize("processes", [1, 2])
def test_taken_port_is_refused_by_its_variable_even_where_processes_would_share_it(processes: int) -> None:
    with bound(processes=2) as listeners:
        listeners.listen()
        taken = port(listeners.public[0])
        with pytest.raises(ConfigError, match=rf"HEADRACE_PORT.*127\.0\.0\.1:{taken} cannot be used: .*in use"):
            bind_listeners(GatewayConfig(port=taken, processes=processes))
        with pytest.raises(ConfigError, match="HEADRACE_OPERATOR_PORT"):
            bind_listeners(GatewayConfig(port=0, operator_port=taken))


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "http://127.0.0.1", "[::1]", "192.0.2.1", "nobody.invalid"])
def test_address_that_is_none_of_this_machine_is_told_by_its_variable_and_not_the_ports(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^HEADRACE_HOST: .*name one of this machine without scheme, brackets and"):
        bind_listeners(GatewayConfig(host=host, port=0))
    with pytest.raises(ConfigError, match=r"^HEADRACE_OPERATOR_HOST: "):
        bind_listeners(GatewayConfig(port=0, operator_host=host, operator_port=0))


@pytest.mark.parametrize(("wanted", "num_taken", "num_attempts"), [(0, 9, 10), (0, 10, None), (8000, 1, None)])
def test_free_port_is_looked_for_several_times_and_a_port_that_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, wanted: int, num_taken: int, num_attempts: int | None
) -> None:
    asked: list[int] = []
    bind = listeners_module._bind_socket

    def often_taken(host: str, port: int, *, is_shared: bool) -> socket.socket:
        if not is_shared and len(asked) < num_taken:
            asked.append(port)
            raise OSError(98, "Address already in use")
        return bind(host, port, is_shared=is_shared)

    monkeypatch.setattr(listeners_module, "_bind_socket", often_taken)
    if num_attempts is None:
        with pytest.raises(ConfigError, match="HEADRACE_PORT"):
            bind_listeners(GatewayConfig(port=wanted, processes=2))
    else:
        with bound(processes=2) as listeners:
            assert len({port(listener) for listener in listeners.public}) == 1
    assert asked == [wanted] * num_taken


def test_address_of_version_6_stands_in_brackets() -> None:
    class Listener:
        def __init__(self, *name: object) -> None:
            self.getsockname = lambda: name

    assert url_of(cast("Any", Listener("::1", 8000, 0, 0)), "https") == "https://[::1]:8000"
    assert url_of(cast("Any", Listener("10.0.0.1", 80))) == "http://10.0.0.1:80"


def test_socket_is_of_the_version_of_its_address() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        found = listeners_module._bind_socket("::1", 0, is_shared=False)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 address of its own: {error}")
    with found:
        assert found.family is socket.AF_INET6


NEEDED = 500 + RESERVED_FILES


def run(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_soft_limit_of_open_files_is_raised_as_needed() -> None:
    out = run("""
        import resource
        from gateway.process.listeners import RESERVED_FILES, affordable_connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700))
        print(affordable_connections(500), resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_FILES)
    """)
    assert out == "500 500"


def test_hard_limit_of_open_files_lowers_the_connections() -> None:
    out = run("""
        import resource
        from gateway.process.listeners import RESERVED_FILES, affordable_connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
        print(affordable_connections(500) + RESERVED_FILES)
    """)
    assert out == "300"


def test_memory_of_large_blocks_goes_back_when_they_are_freed() -> None:
    out = run("""
        import psutil
        from gateway.process.listeners import return_freed_memory
        return_freed_memory()
        rss = psutil.Process().memory_info
        before = rss().rss
        for size in (4 << 20, 1 << 20, 100 << 10):
            blocks = [bytearray(size) for _ in range((64 << 20) // size)]
            # Small ones in between keep a heap from shrinking.
            small = [bytearray(1000) for _ in range(1000)]
            del blocks
        print((rss().rss - before) >> 20)
    """)
    assert int(out) < 16


@pytest.mark.parametrize(
    ("soft", "hard", "affordable", "raised_to"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 500, None),
        (NEEDED, 2 * NEEDED, 500, None),
        (NEEDED - 1, 2 * NEEDED, 500, NEEDED),
        (64, resource.RLIM_INFINITY, 500, NEEDED),
        (64, NEEDED - 1, 499, NEEDED - 1),
        # The files of the process itself are there whatever the limit says.
        (64, RESERVED_FILES + 1, 1, RESERVED_FILES + 1),
        (64, RESERVED_FILES - 9, 1, RESERVED_FILES - 9),
    ],
)
def test_limit_is_raised_no_further_than_needed_and_allowed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, affordable: int, raised_to: int | None
) -> None:
    asked: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_NOFILE: (soft, hard)}[kind])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    assert affordable_connections(500) == affordable
    assert asked == ([] if raised_to is None else [(resource.RLIMIT_NOFILE, (raised_to, hard))])


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    asked: list[str | None] = []

    def load(name: str | None) -> None:
        asked.append(name)
        raise error

    monkeypatch.setattr(ctypes, "CDLL", load)
    return_freed_memory()
    assert asked == [None]
