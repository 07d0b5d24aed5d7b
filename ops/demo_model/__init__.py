"""The demo model: a six-million-parameter Llama trained here on CPython's own standard library.

It exists so that `headrace up` answers with recognisable Python on a laptop with no GPU and no download. `train` makes
everything in `model/` again from nothing but a CPython installation; the serving code never imports this package.
"""
