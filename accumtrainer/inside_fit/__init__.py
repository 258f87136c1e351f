"""The same engine inside `Model.fit`."""
