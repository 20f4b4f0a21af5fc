"""A PPO-trained global scheduler, honest baselines and an offline predictor for the Vidur simulator.

This file and `_autoload.py` are imported at the start of every interpreter: standard library only.
"""

__version__ = "0.1.0"
