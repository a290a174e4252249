"""Make .venv from the hash locks: `python3 .ci/environment.py [stamp ...]`.

Standard library only, and no syntax that an old Python can't parse, so that it can say itself that it is too
old. The stamps are written last: an interrupted run leaves none and the next one starts over. One at a time.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
import venv

OLDEST, NEWEST = (3, 10), (3, 13)
FOLDER = ".venv"
PYTHON = os.path.join(FOLDER, "bin", "python")
LOG = os.path.join("build", "environment.log")
LOCKS = os.path.join("manifests", "toolchain")
NEEDED_GIB = 4


def locked(name):
    # No dependency is looked up and nothing is compiled: the lock's wheels are all that gets in.
    lock = os.path.join(LOCKS, name + ".lock.txt")
    return ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", lock]


# In this order: whatever torch's default build drags in, the compilers are laid over it, by hash.
STEPS = [
    ("what torch asks for", locked("torch")),
    ("torch", ["torch==2.13.0"]),
    ("compilers", locked("export")),
    ("test tools", locked("dev")),
    ("kernseal", ["--no-deps", "--no-build-isolation", "--editable", "."]),
]


def check_machine():
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        fail(
            "kernseal needs Python 3.%d to 3.%d, but %s is %d.%d"
            % (OLDEST[1], NEWEST[1], sys.executable, sys.version_info[0], sys.version_info[1]),
            "name another: make PYTHON=python3.12 ...",
        )
    free = shutil.disk_usage(".").free / 2**30
    if free < NEEDED_GIB:
        fail("%.1f GiB free here, and the environment needs %d GiB" % (free, NEEDED_GIB), "free some space")


def fail(what, hint):
    sys.stderr.write("environment: %s\nenvironment: %s\n" % (what, hint))
    sys.exit(1)


def pip(arguments, log):
    # What the user's PYTHONPATH or ~/.local holds must not answer for the locks.
    foreign = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
    environment = {k: v for k, v in os.environ.items() if k not in foreign}
    environment["PYTHONNOUSERSITE"] = "1"
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"] + arguments
    return subprocess.call(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def tail(path, lines):
    with open(path, errors="replace") as log:
        return "".join(log.readlines()[-lines:])


def make(log):
    started = time.time()
    if os.path.isdir(FOLDER):
        shutil.rmtree(FOLDER)
    print("environment: making %s with %s (log: %s)" % (FOLDER, sys.executable, LOG), flush=True)
    venv.create(FOLDER, with_pip=True, symlinks=True)
    for number, (name, arguments) in enumerate(STEPS, 1):
        began = time.time()
        print("environment: [%d/%d] %s ..." % (number, len(STEPS), name), flush=True)
        if pip(arguments, log) != 0:
            log.flush()
            fail("pip could not install %s:\n%s" % (name, tail(LOG, 15)), "see %s, then run make again" % LOG)
        print("environment: [%d/%d] %s, %.0f s" % (number, len(STEPS), name, time.time() - began), flush=True)
    print("environment: ready after %.0f s" % (time.time() - started), flush=True)


def main(stamps):
    check_machine()
    os.makedirs("build", exist_ok=True)
    with open(os.path.join("build", "environment.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamps and all(os.path.exists(stamp) for stamp in stamps):
            return  # another make was here while this one waited
        with open(LOG, "w") as log:
            make(log)
        for stamp in stamps:
            open(stamp, "w").close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        fail("interrupted", "run make again: it starts over")
    except OSError as error:
        fail(str(error), "run make again: it starts over")
