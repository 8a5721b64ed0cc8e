"""Communication between processes: wire format, control connections, collectives, shards."""
