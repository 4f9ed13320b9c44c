"""The whole table of `hostile_calls`, by hand: `hatch run hostile`, and under sanitizers: `hatch run sanitize`.

`hatch run sanitize --zoo` runs the models of `zoo.py` under sanitizers instead. Prints each fault, and exits 1 if there
is any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from hostile_calls.project import build_wheel, write_project

HERE = Path(__file__).resolve().parent
SANITIZERS = "address,undefined"
REPORT = re.compile(r"(==\d+==\s*ERROR: .*|AddressSanitizer: CHECK failed.*|\S+: runtime error: .*)")


def sanitized():
    """Return the variables for a process that loads objects with sanitizers in them."""
    # libstdc++, since libasan looks for its `__cxa_throw` when it starts, and Python is no C++ program.
    names = ("libasan.so", "libstdc++.so.6")
    paths = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    ]
    # Python and torch leave memory to the end of the process, and torch's own objects throw across each other.
    options = "detect_leaks=0:verify_asan_link_order=1:handle_segv=1:detect_odr_violation=0"
    return {"LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": options, "UBSAN_OPTIONS": "print_stacktrace=0"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="kinds of models; all without any")
    parser.add_argument("--sanitize", action="store_true", help=f"compile with -fsanitize={SANITIZERS}")
    parser.add_argument("--zoo", action="store_true", help="the calls of zoo_check.py")
    parser.add_argument("--only", default="", help="combinations whose id has this regular expression in it")
    options = parser.parse_args()
    environ = {"HATCH_AOTI_SANITIZE": SANITIZERS} if options.sanitize else {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "project")
        if options.zoo:
            from test_zoo import write_project as write_zoo

            write_zoo(root)
            command = [sys.executable, os.fspath(HERE / "zoo_check.py")]
        else:
            write_project(root, tuple(options.kinds))
            only = [f"--only={options.only}"] if options.only else []
            installed = os.fspath(Path(folder, "installed"))
            command = [sys.executable, "-m", "hostile_calls.judge", installed, "--all", *only]
        build_wheel(root, Path(folder, "installed"), **environ)
        path = os.pathsep.join([folder + "/installed", os.fspath(HERE)])
        running = {**os.environ, "PYTHONPATH": path, **(sanitized() if options.sanitize else {})}
        done = subprocess.run(command, env=running, text=True, capture_output=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"id"')]
    faults = [f"{line['id']}: {line['detail']}" for line in lines if line["verdict"] == "fault"]
    reports = sorted({found for line in (done.stdout + done.stderr).splitlines() for found in REPORT.findall(line)})
    for fault in [*faults, *reports]:
        print(f"FAULT: {fault}")
    print(
        f"{len(lines)} combinations, {len(faults)} at fault, {len(reports)} reports of sanitizers; {done.returncode=}"
    )
    if options.zoo or done.returncode:
        print(done.stdout[-3000:], done.stderr[:3000])
    return 1 if faults or reports or done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
