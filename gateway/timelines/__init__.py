"""Timelines of requests: kept for a while by each gateway process, for operators and other gateways."""
