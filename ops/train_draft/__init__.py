"""Training of drafts: small models, Medusa heads and EAGLE layers that learn from a target what it will say next.

The target is run by the project's own model code and never changes; the student is plain torch. What is written is in
the public layouts that `gpu_worker.speculative` reads.
"""
