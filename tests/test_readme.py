"""The README's examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[str(i) for i in range(len(BLOCKS))])
def test_example_runs(block):
    command = [sys.executable, "-W", "ignore", "-c", block]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_there_are_examples():
    assert len(BLOCKS) >= 3
