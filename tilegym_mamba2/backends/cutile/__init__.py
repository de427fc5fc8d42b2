"""The cutile backend: kernels written with cuda.tile, and the host code that launches them."""
