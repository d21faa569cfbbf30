"""Several hosts on one machine: namespaces, each with its own network, name, files and processes.

::

    with Lab(hosts=4, rate="1gbit") as lab:
        lab.run("host0", ["ping", "-c1", "host3"])

``python -m tests.testbed --hosts 4 --rate 1gbit -- COMMAND`` runs a command on its login host.
"""

from tests.testbed.lab import LOGIN, Lab

__all__ = ["LOGIN", "Lab"]
