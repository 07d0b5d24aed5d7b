"""Grafana dashboards, one JSON file each, as Grafana itself saves them."""
