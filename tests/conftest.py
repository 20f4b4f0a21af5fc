"""Lets tests in sub-folders import the helpers that lie beside this file."""

import os
import sys
from pathlib import Path

# The networks are tiny: more threads than cores make torch many times slower. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
