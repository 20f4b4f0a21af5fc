"""Learns: rollouts, advantages, PPO, guards, schedules, warm start and curriculum."""
