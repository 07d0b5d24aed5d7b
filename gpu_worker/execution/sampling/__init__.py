"""From logits to tokens, one feature a file."""
