"""Proposers of drafts, one folder each. They build on what execution offers, which knows only their protocol."""
