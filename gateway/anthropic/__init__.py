"""Anthropic's Messages API: its bodies, its answers and its errors."""
