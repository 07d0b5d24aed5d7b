"""Output that follows a grammar: grammars compiled by llguidance, and what each sequence may say next.

llguidance is imported where it is used, so that a worker without it serves everything else.
"""
