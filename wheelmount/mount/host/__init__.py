"""A mount's agent on a host."""
