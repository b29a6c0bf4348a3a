"""A measuring process without a GPU: times follow a formula, and some trials crash, hang or give wrong results.

    python fake_measurer.py LOG SECONDS faults|lossy|clean

Each answered trial is a line of LOG. Each fault happens once for a LOG, to the first trial behind so many lines.
Lossy: some trials also take the process that asked with them.
"""

import ctypes
import json
import os
import signal
import sys
import time
import zlib

MACHINE = {"arch": "sm_90a", "gpu": "NVIDIA H200", "sms": 132, "driver": "1", "cuda": "13.0", "torch": "2"}
MACHINE |= {"tilelang": "0.1.15", "terrazzo": "0.1.0", "sources": "0123456789abcdef"}
FATES = {1: "crash", 3: "hang", 5: "wrong", 7: "garbage"}
LOST = (2, 6)


def first(log: str, what: str) -> bool:
    """Whether nobody did this before."""
    try:
        open(f"{log}.{what}", "x", encoding="utf-8").close()
    except FileExistsError:
        return False
    return True


def lines(log: str) -> int:
    return len(open(log, encoding="utf-8").readlines()) if os.path.exists(log) else 0


def fate(log: str) -> str:
    """What becomes of a trial."""
    return next((what for at, what in FATES.items() if lines(log) >= at and first(log, what)), "ok")


def lost(log: str) -> bool:
    """Whether the worker that asked is lost with its trial."""
    return any(lines(log) >= at and first(log, f"lost{at}") for at in LOST)


def time_us(message: dict) -> float:
    text = json.dumps([message["facts"], message["m"], message["program"], message["schedule"]], sort_keys=True)
    return 10.0 + zlib.crc32(text.encode()) % 1000 / 100


def main(log: str, seconds: float, kind: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as the real one: it ends with the thread that started it
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "hello":
            print(json.dumps({"machine": MACHINE}), flush=True)
            continue
        print(json.dumps({"started": True}), flush=True)
        if message["do"] == "peer":
            print(json.dumps({"status": "ok", "name": "cublas_f16", "us": 30.0}), flush=True)
            continue
        time.sleep(seconds)
        if kind == "lossy" and lost(log):
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(1)
        found = "ok" if kind == "clean" else fate(log)
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps([found, message["m"], message["program"], message["schedule"]]) + "\n")
        if found == "crash":
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr)
            os._exit(1)
        if found == "garbage":
            os._exit(-11 & 0xFF)
        if found == "hang":
            time.sleep(600)
        if found == "wrong":
            print(json.dumps({"status": "wrong", "error": "3 of 8 elements are wrong"}), flush=True)
            os._exit(0)
        print(json.dumps({"status": "ok", "us": time_us(message), "spread": 0.01}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
