"""Anthropic's Messages API: bodies, answers and errors. An invalid body raises `ApiError` 400."""
