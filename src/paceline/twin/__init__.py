"""The twin: the protocol's own objects in virtual time, with real gradients or with costs alone."""
