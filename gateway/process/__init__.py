"""Processes of a gateway: start, share a port, drain and stop."""
