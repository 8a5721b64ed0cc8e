"""The command line. Nothing here imports torch before it is needed."""
