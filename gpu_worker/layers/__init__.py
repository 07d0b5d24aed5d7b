"""Building blocks of decoders: norm, rotary embedding, attention, MLP, and a decoder's layers one by one or fused."""
