"""The only folder that imports Vidur. Nothing is imported here: phase 1 of plugin loading passes through."""
