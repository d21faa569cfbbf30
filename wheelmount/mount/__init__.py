"""The mount: a directory of the client, read-only on every host, its bytes in the hosts' memory."""
