"""Strategies, one folder each; `paceline.strategies.registry` finds them by name."""
