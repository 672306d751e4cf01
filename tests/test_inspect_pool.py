"""inspect.pool: nothing hangs. This module is what the processes import, so it imports nothing heavy."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from multiattn.inspect import pool
from multiattn.inspect.pool import run_isolated


def misbehave(what):
    if what == "raise":
        raise ValueError("as asked")
    if what == "die":
        os._exit(7)
    if what == "hang":
        time.sleep(60)
    if what.startswith("compile"):
        with subprocess.Popen(["sleep", "60"]) as compiler, open(what.partition(" ")[2], "w") as file:
            print(compiler.pid, file=file, flush=True)
    return what.upper()


class SlowToUnpickle:
    """An item's function whose process takes long to be ready, as one that imports torch on a busy machine."""

    def __reduce__(self):
        return start_slowly, ()


def start_slowly():
    if marker := os.environ.get("POOL_STARTED"):
        Path(marker).touch()
    time.sleep(2)
    return misbehave


def never():
    return False


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_process_that_raises_dies_or_hangs_costs_nobody_else(tmp_path):
    """It is replaced, also where it must not go on after an error. Its start is not its item's time."""
    compiler = tmp_path / "pid"
    items = ["raise", "die", "a", f"compile {compiler}", lambda: "no pickle", "b"]
    outcomes = {it.item: it for it in run_isolated(SlowToUnpickle(), items, jobs=2, timeout_s=1.5, keep=never)}
    assert outcomes["a"].result == "A"
    assert outcomes["b"].result == "B"
    assert outcomes["raise"].error == "ValueError: as asked"
    assert outcomes["die"].error == "the process died with exit code 7"
    assert outcomes[items[3]].error == "not done within 1.5 s"
    assert "pickle" in outcomes[items[4]].error
    assert not is_running(compiler.read_text().strip()), "a compiler goes with the process that waits for it"


def test_nobody_waits_for_what_nobody_wants():
    outcomes = run_isolated(misbehave, ["a", "hang", "hang"], jobs=1, timeout_s=60)
    assert next(outcomes).result == "A"
    since = time.monotonic()
    outcomes.close()
    assert time.monotonic() - since < 30


def test_a_process_that_never_starts_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(pool, "START_TIMEOUT_S", 1.0)
    (outcome,) = run_isolated(SlowToUnpickle(), ["a"], jobs=1, timeout_s=30)
    assert outcome.error == "its process not ready within 1 s"


INTERRUPTED = """
import test_inspect_pool
from multiattn.inspect.pool import run_isolated
try:
    list(run_isolated(test_inspect_pool.SlowToUnpickle(), ["a"], jobs=1, timeout_s=60))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_at_the_terminal_is_the_parents_alone(tmp_path):
    """A terminal sends it to every process, also to those that are still importing."""
    marker = tmp_path / "started"
    paths = [str(Path(__file__).parent), str(Path(pool.__file__).parents[2])]
    environment = os.environ | {"POOL_STARTED": str(marker), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(
        command, env=environment, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        while not marker.exists() and parent.poll() is None:
            time.sleep(0.05)
        os.killpg(parent.pid, signal.SIGINT)
        said, complaints = parent.communicate(timeout=60)
    assert (said, complaints) == ("interrupted\n", "")
