"""Stores of whole objects: a directory or a bucket."""
