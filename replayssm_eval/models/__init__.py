"""Models by name, and where they hold their states."""

from .loading import Loaded, load

__all__ = ["Loaded", "load"]
