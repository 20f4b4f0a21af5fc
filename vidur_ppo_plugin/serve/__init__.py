"""The router in front of real replicas: an OpenAI-compatible reverse proxy that decides as in the simulator."""
