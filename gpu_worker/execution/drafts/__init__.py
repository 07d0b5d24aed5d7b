"""Drafts of a step: asked from a proposer, and verified."""
