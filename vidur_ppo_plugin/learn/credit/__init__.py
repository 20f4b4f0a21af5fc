"""Credit: what a decision is paid, from the moment that it was made. A reward for each of `reward_mode`, and one more:

- `marginal_delay`, of every replica at once: `exact.py`, by a twin that rolls each placement forward; `analytic.py`, by
  a linear model of costs, where the twin does not cover the cluster.
- `queue_delay`, from decision to decision: `queue_delay.py`.
- `hybrid`: its components and their sum, over a sliding window, in `hybrid.py`; of every replica at once, asked of the
  placement, in `hybrid_placement.py`.
- Training with `look_ahead`: `look_ahead.py`, what each placement leads to under the policy, with those who come later.

`decision_rewards.py` pays each decision by the mode that was chosen. Credit is privileged: it may know true output
lengths, so nothing here may feed a decision. Nothing here imports torch or Vidur.
"""
