"""The load generator: sends planned requests to any server of OpenAI's API, and says how it answered."""
