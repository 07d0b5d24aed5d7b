"""Self-speculation: the first layers of the model propose drafts."""
