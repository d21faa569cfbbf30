"""Transfer of blocks between hosts: offer, fetch, compress, pass on."""
