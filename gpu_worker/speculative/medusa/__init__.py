"""Medusa: heads that each predict a token further ahead."""
