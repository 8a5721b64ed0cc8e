"""The command line, one file a command. Nothing here imports torch before it is needed."""
