"""tensor: each layer in slices, one per worker."""
