"""A host's copy of the source's files: its capacity, its bytes, and their verification."""
