"""Grafana dashboards as short descriptions; `python -m ops.dashboards` writes their JSON beside them."""
