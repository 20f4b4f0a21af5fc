"""The recurrence of a GRU layer and its gradient, one sequence, step by step (Cho et al. 2014, torch's variant).

Plain numpy, and compiled by `policy.gru` where numba is there.
"""

from typing import Any

import numpy as np

_HALF, _ONE = np.float32(0.5), np.float32(1.0)


def forward(inputs: Any, hidden: Any, weight: Any, bias: Any) -> Any:
    """Hidden states [time + 1, size], the first being `hidden`, and the gates [time, 4 * size] for the gradient.

    `inputs` [time, 3 * size] are the input's share of the gates reset, update and new; `weight` [size, 3 * size] and
    `bias` make the hidden state's share of them.
    """
    steps, size = inputs.shape[0], hidden.shape[0]
    states = np.empty((steps + 1, size), np.float32)
    gates = np.empty((steps, 4 * size), np.float32)
    states[0] = hidden
    for t in range(steps):
        own = np.dot(states[t], weight) + bias
        # The logistic function as a tanh: it cannot overflow.
        both = _HALF * (_ONE + np.tanh(_HALF * (inputs[t, : 2 * size] + own[: 2 * size])))
        reset, update, own_new = both[:size], both[size:], own[2 * size :]
        new = np.tanh(inputs[t, 2 * size :] + reset * own_new)
        states[t + 1] = new + update * (states[t] - new)
        gates[t, : 2 * size] = both
        gates[t, 2 * size : 3 * size] = new
        gates[t, 3 * size :] = own_new
    return states, gates


def backward(gradients: Any, states: Any, gates: Any, weight_back: Any) -> Any:
    """Gradients [time, 3 * size] of the input's share of the gates, and of the hidden state's share.

    `gradients` [time, size] are those of the hidden states after each step; `weight_back` is `weight` transposed.
    """
    steps, size = gradients.shape
    of_inputs = np.empty((steps, 3 * size), np.float32)
    of_hidden = np.empty((steps, 3 * size), np.float32)
    later = np.zeros(size, np.float32)
    for back in range(steps):
        t = steps - 1 - back
        reset, update = gates[t, :size], gates[t, size : 2 * size]
        new, own_new = gates[t, 2 * size : 3 * size], gates[t, 3 * size :]
        total = gradients[t] + later
        of_new = total * (_ONE - update) * (_ONE - new * new)
        of_inputs[t, :size] = of_new * own_new * reset * (_ONE - reset)
        of_inputs[t, size : 2 * size] = total * (states[t] - new) * update * (_ONE - update)
        of_inputs[t, 2 * size :] = of_new
        of_hidden[t, : 2 * size] = of_inputs[t, : 2 * size]
        of_hidden[t, 2 * size :] = of_new * reset
        later = total * update + np.dot(of_hidden[t], weight_back)
    return of_inputs, of_hidden
