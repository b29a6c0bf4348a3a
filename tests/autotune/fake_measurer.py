"""A measuring process without a GPU: times follow a formula, and chosen schedules crash, hang or give wrong results.

    python fake_measurer.py LOG SECONDS faults|lossy|clean

Each answered trial is a line of LOG. What misbehaves follows from the schedule's own numbers, so that every run agrees.
Lossy: some schedules also take the process that asked with them, the first time that they are tried.
"""

import json
import os
import signal
import sys
import time
import zlib

MACHINE = {"arch": "sm_90a", "gpu": "NVIDIA H200", "sms": 132, "driver": "1", "cuda": "13.0", "torch": "2"}
MACHINE |= {"tilelang": "0.1.15", "terrazzo": "0.1.0", "sources": "0123456789abcdef"}
FATES = {3: "crash", 5: "hang", 7: "wrong", 11: "garbage"}
LOST = (1, 8)


def fate(message: dict) -> str:
    """What becomes of a trial; the first schedule of the heuristic always works."""
    text = json.dumps([message["program"], message["schedule"]], sort_keys=True)
    return FATES.get(zlib.crc32(text.encode()) % 13, "ok")


def lost(message: dict, log: str) -> bool:
    """Whether the worker that asked is to be lost by this trial, which happens once."""
    text = json.dumps([message["m"], message["program"], message["schedule"]], sort_keys=True)
    mark = f"{log}.{zlib.crc32(text.encode())}"
    if zlib.crc32(text.encode()) % 13 not in LOST or os.path.exists(mark):
        return False
    open(mark, "w").close()
    return True


def time_us(message: dict) -> float:
    text = json.dumps([message["facts"], message["m"], message["program"], message["schedule"]], sort_keys=True)
    return 10.0 + zlib.crc32(text.encode()) % 1000 / 100


def main(log: str, seconds: float, kind: str) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "path" in message:
            continue
        if message["do"] == "hello":
            print(json.dumps({"machine": MACHINE}), flush=True)
            continue
        print(json.dumps({"started": True}), flush=True)
        if message["do"] == "peer":
            print(json.dumps({"status": "ok", "name": "cublas_f16", "us": 30.0}), flush=True)
            continue
        time.sleep(seconds)
        if kind == "lossy" and lost(message, log):
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(1)
        found = "ok" if kind == "clean" else fate(message)
        with open(log, "a") as file:
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
