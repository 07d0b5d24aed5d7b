"""Requests to the queue, tokens back to their sinks, and what happens when a worker does not finish."""
