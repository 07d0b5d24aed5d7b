"""OpenAI's batches: a file of requests becomes jobs of the batch lane, and their results become files."""
