"""The replay scan, fast. The torch scan runs everywhere and is the reference for faster ones."""

from .scan import Carry, Row, replay_scan

__all__ = ["Carry", "Row", "replay_scan"]
