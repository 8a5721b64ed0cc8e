"""local_sgd: local steps; weights averaged every h of them, or by drift."""
