"""Moved; works until 1.0 (see `_old_imports.py`)."""

from vidur_ppo_plugin._old_imports import moved

__getattr__ = moved(__name__, {"ActingTwin": "vidur_ppo_plugin.twin.policy_twin.PolicyTwin"})
