"""Model families, one file each, which describe a decoder; its configuration, its checkpoint, and the decoder itself."""
