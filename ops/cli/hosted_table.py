"""The models of hosts as a table, for `headrace model ls` and `headrace top`."""

from __future__ import annotations

from typing import Any

from ops.text_table import aligned, printable_cell

_HEADS = ("MODEL", "HOST", "STATE", "WORKERS", "MODE", "READY IN", "MEMORY", "ERROR")


def hosted_table(hosts: list[dict[str, Any]], *, whole_errors: bool = False) -> list[str]:
    """Return the models of hosts as lines; errors are cut to a cell unless `whole_errors`."""
    errors: dict[str, Any] = {"limit": None} if whole_errors else {}
    rows = [
        (
            printable_cell(model["name"]),
            printable_cell(host["host"]),
            model["state"],
            str(model["num_ready"]),
            "on demand" if model["on_demand"] else "always",
            _ready_in(model),
            f"{model['need_bytes'] / 1e9:.2f} GB" if model["need_bytes"] else "",
            printable_cell(model["error"] or "", **errors),
        )
        for host in hosts
        for model in host["models"]
    ]
    return aligned([_HEADS, *rows])


def _ready_in(model: dict[str, Any]) -> str:
    """Return when it will serve: empty where it fails, and about so where no start has been timed."""
    if model["state"] == "awake":
        return "now"
    if model["state"] == "failed":
        return ""
    return f"{'' if model['load_s'] else 'about '}{model['ready_in_s']:.1f} s"
