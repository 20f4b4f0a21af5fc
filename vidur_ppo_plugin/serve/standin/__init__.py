"""A stand-in of vLLM: a replica of the twin that runs in real time and speaks vLLM's API and metrics, without a GPU."""
