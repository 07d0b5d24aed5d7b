from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ops import dependency_audit
from ops.dependency_audit import ACCEPTED_FILE, accepted_today, audit, fetch_from, installed_closure, main
from ops.stack.ports import free_port

OLD = {
    "id": "GHSA-1",
    "aliases": ["CVE-2026-1"],
    "fixed_in": ["2.0"],
    "summary": "runs what it reads\nand more",
    "withdrawn": None,
}


class Index:
    """A package index that knows some packages."""

    def __init__(self) -> None:
        self.known: dict[str, list[dict[str, Any]]] = {}
        self.paths: list[str] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.paths.append(self.path)
                found = index.known.get(self.path.split("/")[1])
                self.send_response(404 if found is None else 200)
                self.end_headers()
                self.wfile.write(
                    b"no such package" if found is None else json.dumps({"vulnerabilities": found}).encode()
                )

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()


@pytest.fixture
def index() -> Iterator[Index]:
    index = Index()
    yield index
    index.server.shutdown()
    index.server.server_close()
    index.thread.join()


def test_vulnerable_package_is_found_with_its_fix(index: Index) -> None:
    index.known = {"a": [], "b": [OLD, {**OLD, "id": "GHSA-2", "withdrawn": "2026-01-01"}]}
    (finding,), unknown = audit({"a": "1.0", "b": "1.5+cpu"}, fetch_from(index.url), frozenset())
    assert str(finding) == "b 1.5+cpu: GHSA-1 CVE-2026-1 (fixed in 2.0) runs what it reads"
    assert unknown == []
    assert "/b/1.5/json" in index.paths


@pytest.mark.parametrize("name", ["GHSA-1", "CVE-2026-1"])
def test_accepted_vulnerability_passes_by_any_of_its_names(index: Index, name: str) -> None:
    index.known = {"a": [OLD]}
    assert audit({"a": "1.0"}, fetch_from(index.url), frozenset({name})) == ([], [])


def test_package_that_the_index_does_not_know_is_said(index: Index) -> None:
    index.known = {"a": [], "c": [OLD]}
    found, unknown = audit({"a": "1", "b": "1", "c": "1"}, fetch_from(index.url), frozenset())
    assert ([finding.package for finding in found], unknown) == (["c"], ["b"])


def test_index_without_this_service_is_asked_once(index: Index) -> None:
    assert audit(dict.fromkeys("abcdef", "1"), fetch_from(index.url), frozenset()) == ([], list("abcdef"))
    assert len(index.paths) == 1


def test_index_that_cannot_be_reached_fails_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("HEADRACE_AUDIT_INDEX_URL", f"http://127.0.0.1:{free_port()}")
    assert main() == 0
    said = capsys.readouterr()
    assert said.out.startswith("0 of ")
    assert said.err.startswith("not checked, because http://127.0.0.1:")


def test_known_vulnerability_fails_the_audit(index: Index, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    index.known = {"msgspec": [OLD], **{name: [] for name in installed_closure() if name != "msgspec"}}
    monkeypatch.setenv("HEADRACE_AUDIT_INDEX_URL", index.url)
    assert main() == 1
    assert "GHSA-1" in capsys.readouterr().out


def test_closure_has_what_is_needed_directly_and_through_others() -> None:
    closure = installed_closure()
    assert {"msgspec", "nats-py", "click", "starlette", "jinja2", "markupsafe", "anyio"} <= set(closure)
    assert "headrace" not in closure


def test_acceptance_ends(tmp_path: Path) -> None:
    file = tmp_path / "accepted.toml"
    file.write_text('[[accepted]]\nid = "X-1"\nreason = "not called"\nuntil = 2026-06-30\n')
    assert accepted_today(file, date(2026, 6, 30)) == {"X-1"}
    assert accepted_today(file, date(2026, 7, 1)) == frozenset()


@pytest.mark.parametrize("missing", ["id", "reason", "until"])
def test_acceptance_needs_a_reason_and_a_date(tmp_path: Path, missing: str) -> None:
    lines = {"id": 'id = "X-1"', "reason": 'reason = "r"', "until": "until = 2026-06-30"}
    file = tmp_path / "accepted.toml"
    file.write_text("[[accepted]]\n" + "\n".join(line for name, line in lines.items() if name != missing))
    with pytest.raises(ValueError, match="needs id, reason and until"):
        accepted_today(file, date(2026, 1, 1))


def test_file_of_accepted_vulnerabilities_is_readable() -> None:
    accepted_today(ACCEPTED_FILE, date(2026, 1, 1))
    assert dependency_audit.ACCEPTED_FILE.is_file()
