"""The same windows inside `Model.fit`."""
