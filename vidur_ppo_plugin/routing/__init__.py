"""The middle of the package: what a router knows and how it scores replicas. Knows neither Vidur, torch nor vLLM."""
