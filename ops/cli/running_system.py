"""Finds the system that a command should talk to: by the settings, else by the state directory.

An administrator's connection to its NATS lasts as long as a command runs.

What looks for it raises `ConfigError` if no URL is given and nothing runs there, `DependencyError` if that was killed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ops.stack.config import AUDIT_FILE_NAME, DEFAULT_STATE_DIR
from ops.stack.console import told_of_nats
from ops.stack.state import ReadyFile, has_died, read_ready_file
from shared.audit import AUDIT_HELP
from shared.config import setting
from shared.errors import ConfigError, DependencyError, HeadraceError
from shared.nats_files import NatsFiles
from shared.urls import is_http_url

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

CONNECT_TIMEOUT_S = 10.0
# Of the operator's port, which waits for no model.
_OPERATOR_TIMEOUT_S = 60.0
# The number of served models that an error names.
_MAX_NAMES = 8


class ServerRefusedError(HeadraceError):
    """The server's answer is an error or incomplete; `status` is 0 if it broke off.

    `code` is the server's machine-readable reason, such as `model_not_found`, and `retry_after_s` when the same request
    may come again; None if it gives none.
    """

    def __init__(self, status: int, message: str, code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(f"the server answers {status}: {message}" if status else message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The HTTP API of a running system. Methods raise `ServerRefusedError` where it is not there or refuses.

    Attributes:
        silence_s: For how long it may say nothing once connected; None: forever, as a request may wait in the queue.
    """

    url: str
    api_key: str | None
    silence_s: float | None = None

    def own_models(self) -> list[str]:
        """Return the served models; an alias only if the key may not use its model."""
        roots = self.roots()
        return [name for name, root in roots.items() if root == name or root not in roots]

    def roots(self) -> dict[str, str]:
        """Return the model of each served name: an alias stands for its model, any other name for itself."""
        body = self._read("GET", "/v1/models")
        try:
            return {str(model["id"]): str(model.get("root") or model["id"]) for model in json.loads(body)["data"]}
        except (ValueError, KeyError, TypeError):
            raise self._stranger(body) from None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post a request with `stream` set, and yield the chunks as they come."""
        response = self._open("POST", path, {**body, "stream": True})
        try:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if not data or not line.startswith(b"data: "):
                    continue
                yield self._chunk(data)
        except (OSError, http.client.HTTPException) as error:
            raise ServerRefusedError(0, f"the answer broke off: {error!r}") from error
        finally:
            response.close()
        raise ServerRefusedError(0, "the answer broke off: the connection was closed")

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
            error = chunk.get("error")
        except (ValueError, AttributeError):
            raise self._stranger(data) from None
        if error is not None:
            raise ServerRefusedError(0, _error_words(data)[0])
        if not isinstance(chunk.get("choices"), list):
            raise self._stranger(data)
        return dict(chunk)

    def _stranger(self, body: bytes) -> ServerRefusedError:
        words = body[:80].decode(errors="replace")
        return ServerRefusedError(0, f"{self.url} answers, but is not a server of OpenAI's API: it says {words!r}")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make a request and return the JSON object of its answer."""
        answer = self._read(method, path, body)
        try:
            return dict(json.loads(answer))
        except (ValueError, TypeError):
            raise self._stranger(answer) from None

    def _read(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            with self._open(method, path, body) as answer:
                return answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerRefusedError(0, f"the answer of {self.url} broke off: {error!r}") from error

    def _open(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body).encode()
        return self.open(method, path, payload, {"Content-Type": "application/json"})

    def open(
        self, method: str, path: str, payload: bytes | Iterable[bytes] | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Make a request and return its answer, which the caller reads."""
        place = urlsplit(self.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.hostname or "", place.port, timeout=CONNECT_TIMEOUT_S)
        # The connection ends with the answer: it is not used again.
        own = {"Connection": "close"} | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        try:
            connection.connect()
            connection.sock.settimeout(self.silence_s)
            prefix = place.path.rstrip("/").removesuffix("/v1")
            # A server that refuses a long body before its end says why in its answer.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, prefix + path, payload, {**own, **headers})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerRefusedError(0, f"{self.url} does not answer ({error}); is `headrace up` running?") from error
        if not http.client.OK <= response.status < http.client.MULTIPLE_CHOICES:
            told = response.getheader("Retry-After", "")
            retry_after_s = float(told) if told.isdecimal() else None
            raise ServerRefusedError(response.status, *_error_words(response.read()), retry_after_s)
        return response


def find_endpoint(url: str | None, api_key: str | None, state_dir: Path) -> Endpoint:
    """Return the HTTP API to talk to."""
    running = read_ready_file(state_dir)
    if url is None and running is None:
        raise _none_runs("HEADRACE_URL", state_dir, "--url and --api-key")
    _check_url("HEADRACE_URL", url)
    if running is None or (url is not None and url != running.url):
        return Endpoint(url or "", api_key)
    _check_runs(state_dir, running)
    return Endpoint(running.url, api_key or running.api_key)


def only_model(endpoint: Endpoint) -> str:
    """Return the name of the one model that is served.

    Raises:
        ServerRefusedError: None is served, or the server is not there or refuses.
        ConfigError: Several are.
    """
    models = endpoint.own_models()
    if not models:
        raise ServerRefusedError(0, f"{endpoint.url} serves no model yet: no worker has joined")
    if len(models) > 1:
        problem = f"not set, and {len(models)} models are served: {shown_names(models)}; name one"
        raise ConfigError("HEADRACE_MODEL_NAME", problem)
    return models[0]


def tell(text: str) -> None:
    """Tell the user something that is not the command's output."""
    print(f"headrace: {text}", file=sys.stderr, flush=True)


def shown_names(names: list[str]) -> str:
    """Return names as an error lists them."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(name[:64] for name in names[:_MAX_NAMES])}{more}"


def _none_runs(variable: str, state_dir: Path, options: str) -> ConfigError:
    told = f"not set, and no `headrace up` runs on {state_dir}; give --state-dir of one that runs, or {options}"
    return ConfigError(variable, told)


def _check_url(variable: str, url: str | None) -> None:
    if url is not None and not is_http_url(url):
        raise ConfigError(variable, f"{url!r} is no URL of a server; write http://host:port")


def _check_runs(state_dir: Path, running: ReadyFile) -> None:
    if has_died(state_dir, running):
        raise DependencyError(f"no `headrace up` runs on {state_dir}; start it")


def find_admin_nats(url: str | None, state_dir: Path) -> str:
    """Return the NATS URL for an administrator: the one given, else that of the system on the state directory."""
    if url is not None:
        return url
    running = read_ready_file(state_dir)
    if running is None:
        raise _none_runs("HEADRACE_NATS_URL", state_dir, "--nats-url")
    _check_runs(state_dir, running)
    return running.admin_nats_url


def _error_words(body: bytes) -> tuple[str, str | None]:
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode(errors="replace"), None


@dataclass(frozen=True, slots=True)
class OperatorAccess:
    """How to reach the operator's port of a gateway."""

    operator_url: str | None = setting(
        None, "Operator's port of a gateway, as http://host:port; found through the state directory if not given."
    )
    operator_key: str | None = setting(None, "Key of the operator's port.", secret=True)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")


def find_operator(access: OperatorAccess) -> Endpoint:
    """Return the operator's port to talk to; the URL of the public one is refused."""
    running = read_ready_file(access.state_dir)
    if access.operator_url is not None:
        _check_url("HEADRACE_OPERATOR_URL", access.operator_url)
        if running is not None and _origin(access.operator_url) == _origin(running.url):
            problem = f"{access.operator_url} is the public port; the operator's is {_operator_url(running)}"
            raise ConfigError("HEADRACE_OPERATOR_URL", problem)
        return Endpoint(access.operator_url, access.operator_key, _OPERATOR_TIMEOUT_S)
    if running is None:
        raise _none_runs("HEADRACE_OPERATOR_URL", access.state_dir, "--operator-url and --operator-key")
    _check_runs(access.state_dir, running)
    return Endpoint(_operator_url(running), access.operator_key or running.operator_key or None, _OPERATOR_TIMEOUT_S)


def _operator_url(running: ReadyFile) -> str:
    return running.metrics_url.removesuffix("/metrics")


def _origin(url: str) -> str:
    """Return a base URL without the endings that clients give it, and with one name for this machine."""
    return url.rstrip("/").removesuffix("/v1").replace("//localhost:", "//127.0.0.1:")


@dataclass(frozen=True, slots=True)
class AdminAccess(NatsFiles):
    """How an administrator logs in."""

    nats_user: str | None = setting(None, "NATS user of the admin role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)


@dataclass(frozen=True, slots=True)
class AuditedAccess(AdminAccess):
    """How an administrator logs in whose actions are written down, and on which system."""

    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")
    audit_file: Path | None = setting(None, f"{AUDIT_HELP} In the state directory if not given.")

    @property
    def audit_log(self) -> Path:
        """Where actions are written down: what belongs to one system stays in one place."""
        return self.audit_file or self.state_dir / AUDIT_FILE_NAME


@dataclass(frozen=True, slots=True)
class QueueAccess(AuditedAccess):
    """How an administrator reaches the queues."""

    nats_url: str | None = setting(None, "NATS servers; found through the state directory if not given.")
    timeout_s: float = setting(10.0, "How long NATS may take to appear.", minimum=0.1)


@contextlib.asynccontextmanager
async def admin_client(url: str, name: str, access: AdminAccess, timeout_s: float) -> AsyncIterator[Client]:
    """Connect as `name`, waiting `timeout_s` for NATS to appear, and disconnect when the block ends.

    If that takes longer than a moment, the user sees the reason.

    Raises:
        DependencyError: NATS does not appear, or refuses us.
    """
    from shared.nats_connection import connect

    with told_of_nats(url, timeout_s, tell):
        client = await connect(
            url,
            role="admin",
            name=name,
            user=access.nats_user,
            password=access.nats_password,
            files=access,
            timeout_s=timeout_s,
        )
    try:
        yield client
    finally:
        await client.close()


async def delete_message(js: JetStreamContext, stream: str, seq: int) -> None:
    """Delete a message of a stream; one that is gone already is not an error.

    Raises:
        nats.errors.Error: NATS refuses it or does not answer.
    """
    from nats.js.errors import APIError, NotFoundError

    try:
        await js.delete_msg(stream, seq)
    except APIError:
        # The code depends on where NATS notices that the message is gone.
        with contextlib.suppress(NotFoundError):
            await js.get_msg(stream, seq=seq)
            raise
