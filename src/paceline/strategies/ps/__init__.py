"""The parameter-server strategy (`ps`)."""
