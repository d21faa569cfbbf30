"""The mounted tree through FUSE: two adapters, and the kernel's protocol."""
