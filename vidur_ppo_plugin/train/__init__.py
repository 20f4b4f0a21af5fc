"""Training at scale: many simulated clusters at once, in processes of this machine or on a Ray cluster."""
