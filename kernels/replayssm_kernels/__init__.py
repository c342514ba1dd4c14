"""The replay scan, fast. The torch scan runs everywhere and is the reference for faster ones."""

from .scan import Carry, Group, Row, replay_scan

__all__ = ["Carry", "Group", "Row", "replay_scan"]
