"""What a user asks: is it exact, what is in a window, how much memory."""
