"""The command line: one module a command group; parses, calls, prints."""
