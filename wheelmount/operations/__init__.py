"""The work that crosses rooms: a mount, hosts, and something to do on them. One a module."""
