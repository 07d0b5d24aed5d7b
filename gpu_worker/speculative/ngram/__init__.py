"""Prompt lookup: a text goes on as it did where its last tokens occurred before."""
