import os
import signal
import subprocess
import sys
import time

from hatch_aoti.codec import pack
from hatch_aoti.job.values import JobResult, ModelFailure
from hatch_aoti.stages import report_stage

loaded = 0


def load():
    global loaded
    loaded = os.getpid()


def load_and_fail():
    load()
    raise RuntimeError("no such thing")


def describe(payload):
    report_stage("describe")
    print("said by", payload)
    return [payload, os.environ["OWN"], os.getcwd(), os.getppid() == loaded]


def kill(payload):
    report_stage("kill")
    os.kill({"self": os.getpid(), "nursery": os.getppid()}[payload], signal.SIGKILL)
    return "still there"


def quit(payload):
    raise SystemExit(payload)


def fail(payload):
    raise ValueError(payload)


def leave_a_child(payload):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


def leave_a_daemon(payload):
    # In a session of its own, and started by a process that has ended: neither our group nor our child.
    code = "import os, sys, time; print(os.getpid(), flush=True); sys.stdout.close(); os.close(1); time.sleep(1000)"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    done = subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def ask(payload):
    return input()


def close_descriptors(payload):
    os.closerange(3, 256)
    report_stage("still heard")
    return os.stat("/proc/self/fd/0").st_rdev == os.stat("/dev/null").st_rdev


def use(payload):
    import colorsys

    return [colorsys.__file__, sys.path[-1]]


def overflow(payload):
    from pathlib import Path

    from hatch_aoti.build import fork_server

    report_stage("overflow")
    fork_server._deliver({"big": "x" * 100000}, Path(payload, "no such folder", "result.json"))
    os._exit(0)


def fail_once(payload):
    if os.path.exists(payload):
        return "built"
    open(payload, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)


def build_once_killed(payload):
    if not os.path.exists(payload["mark"]):
        open(payload["mark"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return pack(JobResult(ModelFailure("compile", "made up")))


def wait(payload):
    open(payload, "w").close()
    time.sleep(1000)
