"""Anthropic's Messages API: its bodies, its answers and its errors. What is wrong in a body is an `ApiError` 400."""
