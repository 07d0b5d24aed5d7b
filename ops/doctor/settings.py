"""The `HEADRACE_*` variables that are set, their secrets hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ops.doctor.finding import Finding
from ops.doctor.shown_url import HIDDEN, shown_url
from shared.config import PREFIX

_SECRET = re.compile(r"KEY|PASSWORD|TOKEN|SECRET|SEED")
_FILE = re.compile(r"_(FILE|DIR|HOST|PORT)$")
_URL = re.compile(r"_(URL|ENDPOINT)$")
_OTHERS = ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def setting_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield each variable that is set; the command itself has refused those that nothing reads."""
    names = sorted(name for name in environ if name.startswith(PREFIX)) + [name for name in _OTHERS if name in environ]
    if not names:
        yield Finding("settings", "no HEADRACE_* variable is set")
    for name in names:
        yield Finding("settings", f"{name}={shown_value(name, environ[name])}")


def shown_value(name: str, value: str) -> str:
    """Return a variable's value as it may be shown to strangers."""
    if _SECRET.search(name) and not _FILE.search(name):
        return HIDDEN if value else "(empty)"
    return shown_url(value) if "://" in value or _URL.search(name) else value
