"""grouped: synchronous inside a group of workers, asynchronous between groups."""
