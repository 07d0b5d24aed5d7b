"""Building blocks of models: linear, norm, rotary embedding, attention, MLP. A model family composes them."""
