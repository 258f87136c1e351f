"""Snapshots of all that training changes: on disk, and how a run goes on."""
