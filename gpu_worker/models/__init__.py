"""Model families, one file each; reading configurations and checkpoints; the decoder that all families share."""
