"""The demo model, a Llama of seven million parameters, its drafts, and the text that it was trained on.

With it `headrace up` answers with recognisable Python on a laptop without GPU or download. Its card: `model/README.md`.
"""
