"""The twin: runs the protocol in virtual time, with real gradients or with costs only."""
