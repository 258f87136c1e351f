"""From what the user gives to windows: sources, their batches, positions."""
