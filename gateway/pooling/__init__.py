"""Endpoints whose answer is numbers: embeddings, reranking and scores."""
