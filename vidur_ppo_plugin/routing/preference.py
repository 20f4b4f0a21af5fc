"""What a policy is asked for if nobody says: its `tail_preference`, from 0 (the mean) to 1 (the tail)."""

#: Where the policy of the package is best balanced, by docs/experiments.md: below it the slowest first tokens come
#: later than with least_tokens, above it less mean latency is won.
BALANCED = 0.8
