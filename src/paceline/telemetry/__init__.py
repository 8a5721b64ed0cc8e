"""What happened in a run: typed events, the folder they live in, the result they add up to."""
