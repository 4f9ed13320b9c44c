import os
import signal


def aborts():
    print("last words before abort", flush=True)
    os.abort()


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    os._exit(7)


def raises():
    return look_up("layers")


def look_up(key):
    return {"depth": 3}[key]
