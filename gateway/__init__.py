"""The HTTP edge: an OpenAI-compatible gateway that holds the truth about the streams it is serving."""
