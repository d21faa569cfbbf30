"""Delivery by RDMA between emulated machines; see ``run.sh``."""
