"""Scenarios, paired runs, statistics and reports: `vidur-ppo compare`."""
