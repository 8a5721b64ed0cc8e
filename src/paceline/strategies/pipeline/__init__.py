"""pipeline: the model in stages, each on its own worker."""
