"""`make audit`: known vulnerabilities of the installed packages that Headrace needs, as PyPI reports them.

Asks `https://pypi.org/pypi/NAME/VERSION/json`, whose `vulnerabilities` come from the Python Packaging Advisory Database
(OSV). A vulnerability fails the audit, unless it is listed with a reason and a date in
`ops/deploy/accepted-vulnerabilities.toml`. A package index that cannot be asked fails nothing: the audit says how many
packages were not checked. It proves nothing about vulnerabilities that nobody has reported.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

ACCEPTED_FILE = Path(__file__).parent / "deploy" / "accepted-vulnerabilities.toml"
INDEX_URL = "https://pypi.org/pypi"
URL_VARIABLE = "HEADRACE_AUDIT_INDEX_URL"
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 8 << 20
NUM_THREADS = 8

_NAME = re.compile(r"[A-Za-z0-9._-]+")

Fetch = Callable[[str, str], list[dict[str, Any]] | None]
"""Returns the vulnerabilities of a name and version, None when the index does not say."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One known vulnerability of an installed package."""

    package: str
    version: str
    names: tuple[str, ...]
    fixed_in: tuple[str, ...]
    summary: str

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fixed version"
        return f"{self.package} {self.version}: {' '.join(self.names)} ({fixed}) {self.summary}"


def installed_closure(root: str = "headrace") -> dict[str, str]:
    """Return name and version of every installed package that `root` needs, directly or not, with any of its extras."""
    versions: dict[str, str] = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of an extra, or of another platform
        key = _normal(found.metadata["Name"])
        if key in versions:
            continue
        versions[key] = found.version
        waiting += [match[0] for line in found.requires or () if (match := _NAME.match(line))]
    versions.pop(_normal(root), None)
    return versions


def findings_of(package: str, version: str, answers: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Return the vulnerabilities in an index's answer, those that were withdrawn left out."""
    return [
        Finding(
            package,
            version,
            (str(answer.get("id")), *map(str, answer.get("aliases") or ())),
            tuple(map(str, answer.get("fixed_in") or ())),
            str(answer.get("summary") or answer.get("details") or "").split("\n")[0][:120],
        )
        for answer in answers
        if not answer.get("withdrawn")
    ]


def audit(packages: Mapping[str, str], fetch: Fetch, accepted: frozenset[str]) -> tuple[list[Finding], list[str]]:
    """Return the vulnerabilities that are not accepted, and the packages that the index says nothing about.

    The first package is asked for alone: an index that does not know it is not asked for the others.
    """
    first, *rest = sorted(packages.items())
    if fetch(*first) is None:
        return [], sorted(packages)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        answers = list(threads.map(lambda item: fetch(*item), [first, *rest]))
    found: list[Finding] = []
    unknown: list[str] = []
    for (package, version), answer in zip([first, *rest], answers, strict=True):
        if answer is None:
            unknown.append(package)
        else:
            found += [item for item in findings_of(package, version, answer) if not accepted & set(item.names)]
    return found, unknown


def accepted_today(file: Path, today: date) -> frozenset[str]:
    """Return the ids of the vulnerabilities that are accepted until today or later.

    Raises:
        ValueError: An entry has no id, no reason or no date.
    """
    accepted = set()
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("accepted", []):
        if not (entry.get("id") and entry.get("reason") and isinstance(entry.get("until"), date)):
            raise ValueError(f"{file}: an accepted vulnerability needs id, reason and until = YYYY-MM-DD: {entry}")
        if entry["until"] >= today:
            accepted.add(str(entry["id"]))
    return frozenset(accepted)


def fetch_from(index_url: str) -> Fetch:
    """Return a function that asks the package index at this URL."""

    def fetch(package: str, version: str) -> list[dict[str, Any]] | None:
        # An index knows no local versions such as 2.11.0+cpu.
        url = f"{index_url}/{quote(package)}/{quote(version.partition('+')[0])}/json"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                answer = json.loads(response.read(MAX_ANSWER_BYTES))
        except (OSError, ValueError):
            return None
        found = answer.get("vulnerabilities") if isinstance(answer, dict) else None
        return found if isinstance(found, list) else None

    return fetch


def main() -> int:
    """Print what is known; return 1 when something is, and 2 when nothing could be asked for."""
    packages = installed_closure()
    if not packages:
        print("headrace is not installed in this environment, so nothing can be checked", file=sys.stderr)
        return 2
    accepted = accepted_today(ACCEPTED_FILE, datetime.now(UTC).date())
    index_url = os.environ.get(URL_VARIABLE) or INDEX_URL
    found, unknown = audit(packages, fetch_from(index_url), accepted)
    for finding in found:
        print(finding)
    num_checked = len(packages) - len(unknown)
    print(f"{num_checked} of {len(packages)} packages checked, {len(found)} known vulnerabilities")
    if unknown:
        named = "all of them" if num_checked == 0 else ", ".join(unknown)
        print(f"not checked, because {index_url} says nothing about vulnerabilities of: {named}", file=sys.stderr)
    return 1 if found else 0


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
