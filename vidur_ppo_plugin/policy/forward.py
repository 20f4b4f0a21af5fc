"""The actor's forward pass, written for the compiler: one call for one decision, without torch."""

import functools
from typing import Any

import numpy as np

from vidur_ppo_plugin.routing.compiled import compilable, compiled

# Sums may be reordered and products fused, so that vector instructions are used; NaN and infinity keep their meaning.
_FAST_MATH = {"reassoc", "contract", "nsz"}
_BLOCK = 32  # replicas; OpenBLAS starts threads beyond 64 x 64 x 64 products
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
_LAYER_NORM_EPSILON = np.float32(1e-5)  # torch's default
_GELU_SCALE = np.float32(np.sqrt(2.0 / np.pi))
_GELU_CUBE = np.float32(0.044715)
# tanh as a ratio of polynomials, right to a few units in the last place (Eigen, generic_fast_tanh_float). Unlike a call
# of the C library it becomes vector instructions.
_TANH_BOUND = np.float32(7.90531110763549805)
_A1, _A3, _A5 = np.float32(4.89352455891786e-03), np.float32(6.37261928875436e-04), np.float32(1.48572235717979e-05)
_A7, _A9 = np.float32(5.12229709037114e-08), np.float32(-8.60467152213735e-11)
_A11, _A13 = np.float32(2.00018790482477e-13), np.float32(-2.76076847742355e-16)
_B0, _B2 = np.float32(4.89352518554385e-03), np.float32(2.26843463243900e-03)
_B4, _B6 = np.float32(1.18534705686654e-04), np.float32(1.19825839466702e-06)


_vectorised = functools.partial(compilable, fastmath=_FAST_MATH)


@_vectorised
def _product(x: Any, weight: Any, out: Any) -> None:
    """out = x @ weight, by BLAS; in blocks so small that it starts no threads, which cost more than they bring."""
    for first in range(0, len(x), _BLOCK):
        np.dot(x[first : first + _BLOCK], weight, out[first : first + _BLOCK])


@_vectorised
def _normalise(x: Any) -> None:
    """Layer normalisation without gain and bias, of a row, in place."""
    size = np.float32(x.size)
    mean = _ZERO
    for j in range(x.size):
        mean += x[j]
    mean /= size
    variance = _ZERO
    for j in range(x.size):
        x[j] -= mean
        variance += x[j] * x[j]
    scale = _ONE / np.sqrt(variance / size + _LAYER_NORM_EPSILON)
    for j in range(x.size):
        x[j] *= scale


@_vectorised
def _add_and_gelu(x: Any, bias: Any) -> None:
    """GELU, in its tanh form, of x + bias, of a row, in place."""
    for j in range(x.size):
        v = x[j] + bias[j]
        y = _GELU_SCALE * (v + _GELU_CUBE * v * v * v)
        y = min(max(y, -_TANH_BOUND), _TANH_BOUND)
        z = y * y
        p = y * (_A1 + z * (_A3 + z * (_A5 + z * (_A7 + z * (_A9 + z * (_A11 + z * _A13))))))
        q = _B0 + z * (_B2 + z * (_B4 + z * _B6))
        x[j] = _HALF * v * (_ONE + p / q)


@_vectorised
def _add_normalise_and_rectify(x: Any, added: Any, gain: Any, bias: Any) -> None:
    """ReLU of the layer normalisation of x + added, of a row, in place; NaN stays NaN, `max` would drop it."""
    for j in range(x.size):
        x[j] += added[j]
    _normalise(x)
    for j in range(x.size):
        v = x[j] * gain[j] + bias[j]
        x[j] = _ZERO if v < _ZERO else v


@_vectorised
def forward(replicas: Any, request: Any, prior_logits: Any, weights: Any) -> Any:
    """One logit a replica: the prior plus the learned residual; `weights` are `Actor.kernel_weights`.

    A set encoder has a row for each replica, and all have the mean and the maximum over them in common. A flat network
    has one row for the whole cluster, and an output for each replica.
    """
    w1, w2, w_own, w_pooled, w3, head, vectors = weights
    num_replicas, num_features = replicas.shape
    projection, hidden = w2.shape
    is_flat = len(w_pooled) == 0
    num_rows = 1 if is_flat else num_replicas
    num_inputs = replicas.size if is_flat else num_features
    x = np.empty((num_rows, num_inputs + request.size), np.float32)
    rows = replicas.reshape((num_rows, num_inputs))
    for i in range(num_rows):
        x[i, :num_inputs] = rows[i]
        x[i, num_inputs:] = request
        _normalise(x[i])
    h = np.empty((num_rows, projection), np.float32)
    _product(x, w1, h)
    for i in range(num_rows):
        _add_and_gelu(h[i], vectors[0])
    encoded = np.empty((num_rows, hidden), np.float32)
    _product(h, w2, encoded)
    pooled = np.zeros((1, 2 * hidden), np.float32)  # mean, maximum
    pooled[0, hidden:] = -np.inf
    for i in range(num_rows):
        for j in range(hidden):
            encoded[i, j] += vectors[1, j]
            pooled[0, j] += encoded[i, j]
            pooled[0, hidden + j] = max(pooled[0, hidden + j], encoded[i, j])
    pooled[0, :hidden] /= np.float32(num_rows)
    common = np.zeros((1, hidden), np.float32)
    if not is_flat:
        _product(pooled, w_pooled, common)
    common[0] += vectors[2, :hidden]
    y = np.empty((num_rows, hidden), np.float32)
    _product(encoded, w_own, y)
    for i in range(num_rows):
        _add_normalise_and_rectify(y[i], common[0], vectors[3], vectors[4])
    z = np.empty((num_rows, hidden), np.float32)
    _product(y, w3, z)
    for i in range(num_rows):
        _add_normalise_and_rectify(z[i], vectors[5], vectors[6], vectors[7])
    logits = np.empty(num_replicas, np.float32)
    for i in range(num_replicas):
        row, output = (0, i) if is_flat else (i, 0)
        residual = vectors[8, output]
        for j in range(hidden):
            residual += z[row, j] * head[output, j]
        logits[i] = prior_logits[i] + residual
    return logits


forward_compiled = compiled(forward, fastmath=_FAST_MATH)
