"""Where processes are started: on this machine, over SSH, by an engine."""
