"""The tile kernels: one file per kernel, and the device functions they share. No host code."""
