"""Aliases: names that stand for served models, and canaries, which send a share of an alias's requests to another."""
