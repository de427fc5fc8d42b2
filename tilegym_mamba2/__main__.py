"""`python -m tilegym_mamba2`: the same as the command `tilegym-mamba2`."""

from tilegym_mamba2.cli import app

if __name__ == "__main__":
    app(prog_name="tilegym-mamba2")
