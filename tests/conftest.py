"""Lets tests in sub-folders import the helpers that lie beside this file."""

import os
import sys
from pathlib import Path

from hypothesis import settings

# The networks are tiny: more threads than cores make torch many times slower. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

# The first example of a property may have to wait for a function to be compiled.
settings.register_profile("compiling", deadline=None)
settings.load_profile("compiling")
