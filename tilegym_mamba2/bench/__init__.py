"""Benchmarks and tuning: the commands `bench` and `tune`. Nothing else in the package imports it."""
