"""auto: chooses among candidates before and during a run, by measurement."""
