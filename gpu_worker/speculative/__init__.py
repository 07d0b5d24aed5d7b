"""Proposers of draft tokens, one file each. Whatever they propose, only the speed depends on it."""
