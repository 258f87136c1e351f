"""The host's side: the loop, what it drives, and what it is told."""
