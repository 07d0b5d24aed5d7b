"""Recurrent states that are a matrix a head: what the rules that update them have in common, whatever their formulas.

Rows of a state belong to a head's keys, its columns to the values; `kernels.state_rows` says which state a sequence
has. The rules are `kernels.gated_delta` and `kernels.ssd`.
"""
