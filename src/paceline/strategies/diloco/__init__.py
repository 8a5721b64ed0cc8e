"""diloco: many local steps; an outer Nesterov step on their average."""
