"""Roofline model of LLM serving: the time of each operation of a batch, from shapes and data sheets.

Standard library only: simulators, heuristics, the router and a compiled twin share these formulas.
"""

from .attention import AttentionTimer, PrefillLine
from .devices import DEVICES, DeviceSpec
from .elementwise import ElementwiseTimer
from .gemm import GemmTimer
from .model import ModelShape
from .networks import NETWORKS, NetworkSpec
from .roofline import LayerTimes, Roofline

__all__ = [
    "DEVICES",
    "NETWORKS",
    "AttentionTimer",
    "DeviceSpec",
    "ElementwiseTimer",
    "GemmTimer",
    "LayerTimes",
    "ModelShape",
    "NetworkSpec",
    "PrefillLine",
    "Roofline",
]
