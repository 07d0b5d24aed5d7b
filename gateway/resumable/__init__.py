"""Streams that survive their gateway: a log of what was generated, who writes it, and who goes on after a death."""
