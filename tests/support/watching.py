"""Callbacks that note what they are told, and their dispatcher."""


class Fetch:
    """Returns given numbers and counts how often it was asked."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.numbers
