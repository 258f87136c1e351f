"""What TensorFlow must do itself; `backend.py` says what."""
