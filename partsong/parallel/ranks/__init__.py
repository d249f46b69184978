"""Who takes part, and how bytes travel between the ranks."""
