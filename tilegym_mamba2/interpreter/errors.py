"""What the tile interpreter reports. Every class derives from `InterpreterError`."""


class InterpreterError(RuntimeError):
    """Something that the tile interpreter found wrong with a kernel or its launch.

    `kernel`, `block`, `seed` and `location` say where it happened; each is None when it is not known
    (a launch that is refused has no block).
    """

    kernel: str | None = None
    block: tuple[int, ...] | None = None
    seed: int | None = None
    location: str | None = None

    def locate(self, *, kernel: str, block: tuple[int, ...] | None, seed: int | None, location: str | None):
        """Adds the place once, on the way out of the launch."""
        if self.kernel is not None:
            return self
        self.kernel, self.block, self.seed, self.location = kernel, block, seed, location
        where = f"kernel {kernel}"
        if block is not None:
            where += f", block {block}"
        if seed is not None:
            where += f", seed {seed}"
        if location is not None:
            where += f", at {location}"
        self.args = (f"{self.args[0] if self.args else ''}\n  in {where}",)
        return self


class LaunchError(InterpreterError):
    """The launch itself would be refused: grid, number, kind, device or dtype of the arguments."""


class RefusedError(InterpreterError):
    """`cuda.tile` would refuse to compile this: a shape, rank, dtype or argument that is not allowed."""


class UnsupportedError(InterpreterError):
    """Valid `cuda.tile`, or a name it does not have, that the interpreter does not implement."""


class OutOfBoundsError(InterpreterError):
    """An access outside its array whose result `cuda.tile` leaves undefined."""


class RaceError(InterpreterError):
    """An element touched by two blocks of one launch, at least one of them writing, without atomics."""


class NeverWrittenError(InterpreterError):
    """An element of an output that no block wrote."""


class IntegerOverflowError(InterpreterError):
    """Signed integer arithmetic past the range of its dtype, which wraps around on the device."""


class IntegerDivisionError(InterpreterError):
    """An integer divided by zero, which the device leaves undefined."""


class KernelAssertionError(InterpreterError):
    """A failed `ct.assert_`, `ct.static_assert` or `ct.assume_divisible_by`."""


class KernelCrashError(InterpreterError):
    """Any other Python exception inside a kernel; the original one is its `__cause__`."""
