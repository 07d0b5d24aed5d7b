"""Linear layers: the forms that weights have, and in a room each the kernels that multiply rows by them."""
