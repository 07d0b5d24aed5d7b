"""OpenAI's Responses API: answers with items and state, kept in a log that every gateway reads."""
