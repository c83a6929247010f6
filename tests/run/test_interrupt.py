"""Ctrl-C ends a program in one line, whatever it was doing, and after it has cleaned up."""

import subprocess
import sys

import pytest


BEGIN = """
import os, signal, sys, time
from trl_fp8.run.interrupt import ended_by_ctrl_c

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)

with ended_by_ctrl_c(lambda: "stopped here"):
"""
AT_ONCE = "    ctrl_c()"
# By the launcher that passes its own on, while the first is worked off
TWICE = """
    try:
        ctrl_c()
    finally:
        ctrl_c()
        print("cleaned up")
"""
# By the user, who does not want to wait
LATER = """
    try:
        ctrl_c()
    finally:
        time.sleep(1.1)
        ctrl_c()
        print("cleaned up")
"""
# As a collective whose other rank is gone
FOLLOWED = """
    try:
        ctrl_c()
    finally:
        raise RuntimeError("the other rank is gone")
"""
AT_THE_END = """
    import atexit
    atexit.register(lambda: sys.stderr.write("a library says goodbye"))
    ctrl_c()
"""


@pytest.mark.parametrize(
    ("code", "out", "err"),
    [
        (AT_ONCE, "", "\nstopped here\n"),
        (TWICE, "cleaned up\n", "\nstopped here\n"),
        (LATER, "", ""),
        (FOLLOWED, "", "\nstopped here\n"),
        (AT_THE_END, "", "\nstopped here\n"),
    ],
    ids=["at once", "twice", "later", "followed by an error", "at the end"],
)
def test_ctrl_c_is_one_line_and_status_130(code, out, err):
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, out, err)


TAKEN = """
    try:
        ctrl_c()
    except KeyboardInterrupt:  # as a library may
        pass
"""
LONG_AFTER = """
    import trl_fp8.run.interrupt as module
    module.FOLLOWS = 0.0
    1 / 0
"""


def test_an_interrupt_that_a_library_took_hides_neither_success_nor_a_later_error():
    done = subprocess.run([sys.executable, "-c", BEGIN + TAKEN], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([sys.executable, "-c", BEGIN + TAKEN + LONG_AFTER], capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_without_ctrl_c_errors_and_statuses_are_what_they_are():
    done = subprocess.run([sys.executable, "-c", BEGIN + "    1 / 0"], capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    done = subprocess.run([sys.executable, "-c", BEGIN + "    sys.exit(2)"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == ""
