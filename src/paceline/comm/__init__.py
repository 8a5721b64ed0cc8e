"""How processes talk: wire format, control connections, collectives, shards of parameters."""
