"""OpenAI's files: uploads in a directory or a bucket that all gateways share."""
