"""The kernel's side: its calls, mount points, and which mounts and processes show a tree."""
