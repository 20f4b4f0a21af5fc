"""Decides: the actor-critic, the actor without torch, the policy that they make, temperature."""
