"""Install unpacked wheels into the environment of the Python that runs it, as copies or links.

A copy of this package travels with the wheels (see ``linktree``), so that a host or a container
needs nothing but its Python: it imports the standard library and itself only, and starts quickly.
"""
