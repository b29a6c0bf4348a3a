"""The executor ray on a local cluster with fake parts: faults, lost workers, kernels that travel."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

import pytest
import tuning
from terrazzo.autotune import cluster, runner
from terrazzo.autotune.database import Database
from terrazzo.cli import main
from terrazzo.lowering import cache
from terrazzo.lowering.errors import CacheError, ToolchainError

needs_ray = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("ray"), reason="ray is not installed (extra cluster)"
)
JOB = dataclasses.replace(tuning.SMALL, m=(64,))


def fake_compile(folder: str):
    """A compile task that makes an entry of the cache; the first one of all takes its worker with it."""

    def task(request):
        import os
        import signal
        import zlib
        from pathlib import Path

        from terrazzo.autotune.cluster import entry_of
        from terrazzo.lowering import cache, folders
        from terrazzo.lowering.report import KernelReport

        def first(what: str) -> bool:
            try:
                (Path(folder) / what).touch(exist_ok=False)
            except FileExistsError:
                return False
            return True

        if first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if first("failed"):
            return {"error": "nvcc said no"}
        key = f"{zlib.crc32(json.dumps(request, sort_keys=True, default=str).encode()):08x}"
        private = Path(folder, key)
        private.mkdir()
        for name in cache.FILES:
            (private / name).write_bytes(key.encode() * 100)
        (private / "report.json").write_text(json.dumps(KernelReport(40, 0, 0, 0, 0, 0).as_dict()))
        folders.write_manifest(private, {"identity": key})
        return entry_of(private)

    return task


@needs_ray
def test_nothing_is_lost_and_nothing_is_measured_twice(tmp_path, monkeypatch):
    """Crashes, hangs, wrong results, workers killed with a trial or a kernel in hand: each schedule is one trial."""
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    log, made = tmp_path / "log", tmp_path / "made"
    made.mkdir()
    command = (sys.executable, str(tuning.HERE / "fake_measurer.py"), str(log), "0", "lossy")
    local = dict(num_cpus=2, num_gpus=2, object_store_memory=80 << 20)
    with cluster.Cluster(None, None, command, 3.0, fake_compile(str(made)), **local) as ray:
        assert len(ray.measurers) == 2 and ray.cpus == 2
        with Database(tmp_path / "t.db") as database:
            job = runner.Runner(JOB, database, ray.measurers, ray.compiler, workers=ray.cpus)
            summary = job.run()
            kept = database.trials()
    assert summary.ended == "done" and summary.lost == 0 and summary.trials == len(kept)
    target = runner.Target.parse("sm_90a")
    space = {
        (p, c.program, tuple(sorted(c.params.items())))
        for p in JOB.problems()
        for c in runner.candidates(p, target, JOB)
    }
    searched = Counter((it.problem, it.program, it.params) for it in kept if it.role != "confirm")
    assert set(searched) == space and set(searched.values()) == {1}
    statuses = Counter(it.status for it in kept)
    assert {"ok", "crash", "hang", "wrong", "compile"} <= set(statuses), statuses
    # what was logged as measured is what is kept, once
    measured = Counter(json.loads(line)[0] for line in log.read_text().splitlines())
    assert measured["ok"] == statuses["ok"] and measured["wrong"] == statuses["wrong"]
    assert measured["hang"] == statuses["hang"]
    lost = len(list(tmp_path.glob("log.lost*")))
    assert lost == 2 and summary.restarts >= lost, (lost, summary.restarts)
    crashes = [it.error for it in kept if it.status == "crash"]
    assert not any("lost" in error for error in crashes)
    # every kernel that was compiled lies whole in the cache of the machine that measures
    entries = list((tmp_path / "cache" / "v2" / "kernels").iterdir())
    assert len(entries) == len({it.params for it in kept if it.status != "compile"})
    assert all(cache.lookup(entry.name) == entry for entry in entries)
    assert (made / "killed").exists()  # a compile task whose worker died was run again


def stand_in(**resources):
    """What Ray says of a cluster."""
    closed = []
    made = types.SimpleNamespace(init=lambda **_: None, cluster_resources=lambda: resources)
    made.shutdown = lambda: closed.append(True)
    return made, closed


def test_a_cluster_without_a_gpu_says_so(monkeypatch):
    ray, closed = stand_in(CPU=4.0)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ToolchainError, match="has no GPU"):
        cluster.Cluster()
    assert closed
    ray.init = lambda **_: (_ for _ in ()).throw(ConnectionError("no answer"))
    with pytest.raises(ToolchainError, match="no Ray cluster at auto: no answer"):
        cluster.Cluster("auto")


@pytest.fixture
def port():
    """A loopback port, and the socket that has it: closed, or what the test makes of it."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made.getsockname()[1], made


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("kind", ["closed", "mute", "other"])
def test_an_address_that_is_no_ray_is_an_error_within_30_seconds(kind, scheme, port, monkeypatch, capsys):
    """Nothing listens, or what accepts never answers, or answers in another protocol."""
    number, listening = port
    if kind != "closed":
        listening.listen()
    if kind == "other":
        threading.Thread(
            target=lambda: listening.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n"), daemon=True
        ).start()
    monkeypatch.setattr(cluster, "ANSWER_S", 2.0)  # 8 s, of which there are two
    begun = time.monotonic()
    said = {"closed": "refused", "mute": "no answer in 2 s", "other": "no Ray"}[kind]
    with pytest.raises(ToolchainError, match=rf"no Ray cluster at 127.0.0.1:{number}: .*{said}.*; give --address"):
        cluster.Cluster(f"{scheme}127.0.0.1:{number}")
    assert time.monotonic() - begun < 25.0 and 2 * cluster.ANSWER_S < 30
    if kind == "closed":
        line = ["tune", "--shape", "512x1024", "--m", "64", "--strategy", "top-k", "--executor", "ray"]
        assert main([*line, "--address", f"{scheme}127.0.0.1:{number}"]) == 2
        assert "no Ray cluster" in capsys.readouterr().err


def test_a_server_of_rays_protocol_is_let_through(port, monkeypatch):
    number, listening = port
    listening.listen()
    settings = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0)) + b"settin"

    def serve() -> None:
        while True:
            listening.accept()[0].sendall(settings)

    threading.Thread(target=serve, daemon=True).start()
    for address in (f"127.0.0.1:{number}", f"ray://localhost:{number}"):
        cluster.check_answers(address)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{number}")
    cluster.check_answers(None)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ToolchainError, match="no Ray cluster at 127.0.0.1:1"):
        cluster.check_answers(None)
    monkeypatch.delenv("RAY_ADDRESS")
    for elsewhere in (None, "local", "anyscale://x:1"):
        cluster.check_answers(elsewhere)
    for odd in ("[::1", "host:port", "127.0.0.1:99999", "ray://:x"):
        with contextlib.suppress(ToolchainError):
            cluster.check_answers(odd)


@pytest.fixture
def rays_own(tmp_path, monkeypatch):
    """`rays_own(init)`: the module `ray` of the process that connects first, and a peer that sends its settings."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the module changes within a second
    monkeypatch.setattr(cluster, "search_path", lambda: [str(tmp_path), *(entry for entry in sys.path if entry)])
    monkeypatch.setattr(cluster, "check_answers", lambda address: None)
    monkeypatch.setitem(sys.modules, "ray", stand_in(CPU=4.0, GPU=1.0)[0])
    text = "import os, sys, time\ndef shutdown(): pass\ndef init(address, **_):\n    "
    return lambda init: (tmp_path / "ray.py").write_text(text + init + "\n")


def test_a_peer_that_never_lets_anybody_in_is_an_error_in_time(rays_own, tmp_path, monkeypatch):
    """Whatever Ray does meanwhile: waits, starts processes, ends the process, fails."""
    monkeypatch.setattr(cluster, "CONNECT_S", 1.0)
    pid = tmp_path / "pid"
    rays_own(f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    begun = time.monotonic()
    for address in ("127.0.0.1:6379", "ray://127.0.0.1:10001"):
        with pytest.raises(ToolchainError, match=r"no Ray cluster at 127.0.0.1:\d+: it answers, and lets nobody in"):
            cluster.Cluster(address)
    assert time.monotonic() - begun < 25 and not Path(f"/proc/{pid.read_text()}").exists()
    for init, said in (
        ("os.abort()", "it ended without a word"),
        ("print('GCS is gone', file=sys.stderr); os._exit(1)", "GCS is gone"),
        ("raise ConnectionError('no raylet here')", "ConnectionError: no raylet here"),
    ):
        rays_own(init)
        with pytest.raises(ToolchainError, match=rf"no Ray cluster at 127.0.0.1:1: {said}.*; give --address"):
            cluster.Cluster("127.0.0.1:1")
    rays_own("assert address == '127.0.0.1:1'")
    assert cluster.Cluster("127.0.0.1:1").cpus == 4
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert cluster.Cluster().cpus == 4
    rays_own("os.abort()")
    assert cluster.Cluster("local").cpus == 4  # started here: there is no peer


@needs_ray
@pytest.mark.parametrize("scheme", ["", pytest.param("ray://", marks=pytest.mark.slow)])
def test_a_peer_that_sends_its_settings_and_then_nothing_is_an_error_in_time(scheme, port, monkeypatch):
    number, listening = port
    listening.listen()
    settings, held = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), []

    def serve() -> None:
        while True:
            held.append(listening.accept()[0])
            held[-1].sendall(settings)

    threading.Thread(target=serve, daemon=True).start()
    monkeypatch.setattr(cluster, "CONNECT_S", 3.0)
    begun = time.monotonic()
    with pytest.raises(ToolchainError, match=f"no Ray cluster at 127.0.0.1:{number}: it answers, and lets nobody in"):
        cluster.Cluster(f"{scheme}127.0.0.1:{number}")
    assert time.monotonic() - begun < 60 and held  # Ray's import included


def test_the_command_runs_on_a_cluster(tmp_path, monkeypatch, capsys):
    """`--executor ray` takes its parts from the cluster and closes it; here the parts are fakes."""
    ray, closed = stand_in(CPU=4.0, GPU=2.0)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "RayMeasurer", lambda *_: tuning.measurer(tmp_path / "log"))
    monkeypatch.setattr(cluster, "RayCompiler", lambda _, done: tuning.InstantCompiler(done))
    line = ["tune", "--shape", "512x1024", "--m", "64", "--strategy", "top-k", "--trials", "3", "--executor", "ray"]
    line += ["--database", str(tmp_path / "t.db")]
    assert main(line) == 0 and closed
    with Database(tmp_path / "t.db") as database:
        assert len(database.trials()) >= 3
    assert main([*line, "--gpus", "0,1"]) == 2
    assert "a number of workers" in capsys.readouterr().err


def test_the_executor_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ToolchainError, match=r"terrazzo\[cluster\]"):
        cluster.Cluster()


def test_kernels_travel_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "here"))
    write = lambda folder: [(folder / name).write_bytes(b"code") for name in cache.FILES]
    made = cache.get_or_build("abc", {"identity": "x"}, write)
    entry = cluster.entry_of(made)
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "there"))
    assert cache.lookup("abc") is None
    there = cluster.adopt(entry)
    assert there == cache.lookup("abc") and (there / "kernel.so").read_bytes() == (made / "kernel.so").read_bytes()
    assert cluster.adopt(entry) == there
    assert json.loads((there / cache.MANIFEST).read_text())["identity"] == "x"
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "here" / "v2" / "kernels" / "abc" / "kernel.so"))
    with pytest.raises(CacheError):
        cluster.adopt(entry)
    assert os.environ["TERRAZZO_CACHE_DIR"] and isinstance(there, Path)
