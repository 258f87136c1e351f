"""What a GPU is asked: precision, speed, memory, and what does not fit."""
