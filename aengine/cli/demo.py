"""`aengine demo`."""


def demo() -> None:
    """Train."""
