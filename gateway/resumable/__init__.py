"""Streams that survive their gateway: a log of the output, its writer, and takeover after a death."""
