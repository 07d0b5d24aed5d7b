"""The models of hosts as a table, for `headrace model ls` and `headrace top`."""

from __future__ import annotations

from typing import Any

from ops.text_table import aligned, printable_cell

_HEADS = ("MODEL", "HOST", "STATE", "WORKERS", "MODE", "READY IN", "MEMORY", "ERROR")


def hosted_table(hosts: list[dict[str, Any]]) -> list[str]:
    """Return the models of hosts as lines."""
    rows = [
        (
            printable_cell(model["name"]),
            printable_cell(host["host"]),
            model["state"],
            str(model["num_ready"]),
            "on demand" if model["on_demand"] else "always",
            f"{model['ready_in_s']:.1f} s" if model["ready_in_s"] else "",
            f"{model['need_bytes'] / 1e9:.2f} GB" if model["need_bytes"] else "",
            printable_cell(model["error"] or ""),
        )
        for host in hosts
        for model in host["models"]
    ]
    return aligned([_HEADS, *rows])
