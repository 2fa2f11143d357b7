"""Commands as processes of their own, which are killed, or whose disk is full.

A limit on the size of files stands for a full disk: the kernel refuses the bytes beyond it in the
middle of a write, as a disk does.
"""

import os
import signal
import subprocess
import sys
import time

from support.run_script import FIXED, ROOT

# No more devices than a laptop has.
LAPTOP = {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def start(arguments, largest_file=None, environment=LAPTOP, **options):
    """Starts a command as a user does."""
    limited = [] if largest_file is None else ["-c", LIMITED, largest_file]
    command = map(str, [sys.executable, *limited, *arguments])
    here = dict(cwd=ROOT, env=os.environ | FIXED | environment, text=True)
    return subprocess.Popen([*command], **here, **options)


def killed_when(is_time, arguments, **options):
    """Runs a command until this function returns true, then kills it without cleanup."""
    process = start(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)
    try:
        until = time.monotonic() + 900
        while process.poll() is None and not is_time() and time.monotonic() < until:
            time.sleep(0.002)
    finally:
        process.kill()
    errors = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, errors


def done(arguments, **options):
    """Returns the exit status, output and errors of a command."""
    process = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    output, errors = process.communicate(timeout=900)
    return process.returncode, output, errors
