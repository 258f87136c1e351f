"""What PyTorch must do itself; `backend.py` says what."""
