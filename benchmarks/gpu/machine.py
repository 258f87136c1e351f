"""What it was measured with."""

import platform
from importlib import metadata

import keras

import accumtrainer


def rows(device, sizes, **_):
    """Yield one row: the card and the versions."""
    del sizes
    backend = keras.backend.backend()
    yield {
        "card": device.name,
        "GiB for us": device.memory_bytes() / 2**30,
        "versions": ", ".join(
            [
                f"{backend} {metadata.version(backend)}",
                *device.versions(),
                f"keras {keras.__version__}",
                f"accumtrainer {accumtrainer.__version__}",
                f"numpy {metadata.version('numpy')}",
                f"Python {platform.python_version()}",
            ]
        ),
    }
