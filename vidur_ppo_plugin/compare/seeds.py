"""Which seeds are for what: nothing that was tuned or measured on one kind is judged on the same requests.

Training may use any other seed: those below `COMPARISON.start`, or, as `vidur-ppo train` does, from a million on.
"""

COMPARISON = range(1_000, 2_000)
TUNING = range(2_000, 3_000)
CAPACITY = range(3_000, 4_000)
