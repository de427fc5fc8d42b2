"""Mamba-2 ops for TileGym."""

__version__ = "0.1.0"
