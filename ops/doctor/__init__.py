"""Checks an installation, and reports problems with their remedies."""
