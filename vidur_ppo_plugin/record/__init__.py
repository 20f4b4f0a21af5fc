"""What a run leaves behind: results, metrics, progress."""
