"""What JAX must do itself; `backend.py` says what."""
