"""A host's copy of the files: whether there is room, how the bytes are kept and verified."""
