"""Decides: the actor-critic, its numpy twin for the hot path, temperature and sampling."""
