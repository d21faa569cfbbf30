"""Deliveries over a simulated clock and network: the classes of production, thousands of times.

``python -m tests.simulation --seeds 10000`` plays as many; a seed that fails is played again, with
what happened, by ``--first SEED --seeds 1 --verbose``.
"""
