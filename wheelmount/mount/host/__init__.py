"""What happens on a host: the agent of a mount."""
