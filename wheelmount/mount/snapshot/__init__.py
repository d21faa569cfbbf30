"""What a directory of the client is: its tree, its blocks, and from one tree to the next."""
