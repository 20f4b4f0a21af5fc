"""What a policy is asked for if nobody says: its `tail_preference`, from 0 (the mean) to 1 (the tail)."""

#: Where the policy of the package is best balanced, by docs/experiments.md: below it first tokens of some come late,
#: above it mean latency is given away where speeds differ.
BALANCED = 0.3
