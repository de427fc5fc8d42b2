"""Processes that each run one task at a time and may die, hang or lose their GPU without harm to the rest."""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

# torch, TileGym and a CUDA context on a machine whose other cores are starting the same
START_SECONDS = 180.0


def run_in_processes(
    make_runner: Callable[..., Callable[[Any], None]],
    runner_args: tuple,
    tasks: Sequence[Any],
    *,
    workers: int,
    task_seconds: float = 120.0,
    deadline: float | None = None,
) -> Iterator[tuple[int, str]]:
    """Run every task in one of `workers` fresh processes; yields (index, reason), "" when it succeeded.

    `make_runner(*runner_args)` is called once in each process and gives the function that runs a task; both
    must be picklable. A task fails with its exception's text, its process's death, or by not ending within
    `task_seconds` (starting up not counted); only after a death does that worker's next task start a new
    process. Tasks not started by `deadline` (of `time.monotonic()`) fail as "not reached". Results come in
    the order of completion.
    """
    local = threading.local()
    started: list[_Worker] = []
    lock = threading.Lock()

    def one(index: int) -> tuple[int, str]:
        if deadline is not None and time.monotonic() > deadline:
            return index, "not reached before the time limit"
        worker = getattr(local, "worker", None)
        if worker is None or not worker.alive():
            worker = local.worker = _Worker(make_runner, runner_args)
            with lock:
                started.append(worker)
        return index, worker.run(tasks[index], task_seconds)

    with ThreadPoolExecutor(max(1, min(workers, len(tasks)))) as threads:
        try:
            for future in as_completed([threads.submit(one, i) for i in range(len(tasks))]):
                yield future.result()
        finally:
            threads.shutdown(cancel_futures=True)
            for worker in started:
                worker.stop()


class _Worker:
    def __init__(self, make_runner: Callable[..., Callable[[Any], None]], runner_args: tuple) -> None:
        # spawn: a forked child could not use CUDA
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make_runner, runner_args), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def alive(self) -> bool:
        return self._process.is_alive()

    def run(self, task: Any, seconds: float) -> str:
        try:
            if not self._ready:
                if not self._pipe.poll(START_SECONDS):
                    self.stop()
                    return f"its process did not start within {START_SECONDS:.0f} s"
                broken = self._pipe.recv()
                if broken:
                    self.stop()
                    return broken
                self._ready = True
            self._pipe.send(task)
            if not self._pipe.poll(seconds):
                self._process.kill()
                self._process.join()
                return f"no end after {seconds:.0f} s"
            reason, usable = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            return f"its process ended with status {self._process.exitcode}"
        if not usable:
            self.stop()
        return reason

    def stop(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._pipe.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, make_runner: Callable[..., Callable[[Any], None]], runner_args: tuple) -> None:
    try:
        runner = make_runner(*runner_args)
    except Exception as error:
        pipe.send(f"the worker could not start: {_text(error)}")
        return
    pipe.send("")
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # no CUDA teardown: the parent is waiting to measure
        reason, usable = "", True
        try:
            runner(task)
        except Exception as error:
            reason, usable = _text(error), _device_usable()
        pipe.send((reason, usable))


def _device_usable() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
