"""Implementations of the ops, one package per backend; each is imported at the first call that uses it."""
