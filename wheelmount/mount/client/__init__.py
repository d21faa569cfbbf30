"""The client's end of a mount: its calls, its delivery and the agents that it has on hosts."""
