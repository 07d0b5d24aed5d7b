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
            _workers(model),
            "on demand" if model["on_demand"] else "always",
            _ready_in(model),
            f"{model['need_bytes'] / 1e9:.2f} GB" if model["need_bytes"] else "",
            printable_cell(model["error"] or "", **errors),
        )
        for host in hosts
        for model in host["models"]
    ]
    return aligned([_HEADS, *rows])


def _workers(model: dict[str, Any]) -> str:
    num_withheld = model.get("num_withheld", 0)
    return f"{model['num_ready']}{f', {num_withheld} cordoned' if num_withheld else ''}"


def _ready_in(model: dict[str, Any]) -> str:
    """Return when it will serve: empty where that is unknown, and about so where no start has been timed."""
    is_withheld = 0 < model["num_ready"] == model.get("num_withheld", 0)
    if model["state"] == "failed" or is_withheld:
        return ""
    if model["state"] == "awake":
        return "now"
    return f"{'' if model['load_s'] else 'about '}{model['ready_in_s']:.1f} s"
