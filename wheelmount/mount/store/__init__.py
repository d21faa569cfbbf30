"""A host's copy of the files: room for it, its bytes, and their verification."""
