"""Model families, one file each, composed from `layers`."""
