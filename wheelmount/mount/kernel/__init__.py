"""The kernel's mounts: system calls, mount points, and the mounts and processes that use a tree."""
