"""The kernel cache under many processes, damage, kills and full disks."""

import errno
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from terrazzo.lowering import cache, environment_report, folders
from terrazzo.lowering.errors import CacheError

KEY = "c" * 64
REPORT = {"registers": 40, "spill_stores": 0, "tensor_instructions": []}
META = {"request": {"name": "n", "target": "sm_80", "params": {}}}
# A build that notes that it ran, takes a while, and writes a kernel's files.
BUILDER = f"""
import os, pathlib, sys, time
from terrazzo.lowering import cache
def build(folder):
    with open(os.environ["BUILDS"], "a") as log:
        log.write("build\\n")
    (folder / "kernel.so").write_bytes(b"first half")
    print("building", flush=True)
    time.sleep(float(os.environ.get("BUILD_SECONDS", "0.2")))
    (folder / "kernel.cu").write_text("")
    (folder / "report.json").write_text({json.dumps(json.dumps(REPORT))})
print(cache.get_or_build(os.environ.get("KEY", {KEY!r}), {META!r}, build), flush=True)
"""


@pytest.fixture
def builds(cache_dir, tmp_path, monkeypatch):
    """Path of a file that grows by one line with each build."""
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    (tmp_path / "builds").touch()
    return tmp_path / "builds"


def start(**environment):
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


def write_files(folder, text="code"):
    (folder / "kernel.so").write_text(text)
    (folder / "kernel.cu").write_text("")
    (folder / "report.json").write_text(json.dumps(REPORT))


def make(key=KEY, text="code"):
    return cache.get_or_build(key, META, lambda folder: write_files(folder, text))


def rooms(cache_dir):
    return {
        name: len(list((cache_dir / cache.VERSION / name).iterdir()))
        for name in ("kernels", "building", "quarantine")
        if (cache_dir / cache.VERSION / name).is_dir()
    }


def test_many_processes_build_once(builds, cache_dir):
    processes = [start() for _ in range(5)]
    answers = {process.communicate(timeout=60)[0].split()[-1] for process in processes}
    assert answers == {str(cache_dir / cache.VERSION / "kernels" / KEY)} and builds.read_text() == "build\n"
    assert rooms(cache_dir) == {"kernels": 1, "building": 0}


def test_many_threads_build_once(cache_dir):
    ran = []

    def build(folder):
        ran.append(1)
        time.sleep(0.1)
        write_files(folder)

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(lambda _: cache.get_or_build(KEY, META, build), range(6)))) == 1
    assert ran == [1]


def test_a_killed_build_leaves_nothing_behind(builds, cache_dir):
    victim = start(BUILD_SECONDS="60")
    assert victim.stdout.readline() == "building\n"
    waiting = start()
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert waiting.communicate(timeout=60)[0].split()[-1].endswith(KEY)
    assert builds.read_text() == "build\n" * 2 and rooms(cache_dir) == {"kernels": 1, "building": 0}
    assert [row["ok"] for row in cache.verify()] == [True]


def test_a_stopped_builder_delays_others_only_for_the_timeout(builds, cache_dir):
    stopped = start(BUILD_SECONDS="1")
    assert stopped.stdout.readline() == "building\n"
    stopped.send_signal(signal.SIGSTOP)
    entry = cache.get_or_build(KEY, META, lambda folder: write_files(folder, "mine"), timeout=0.2)
    stopped.send_signal(signal.SIGCONT)
    assert stopped.communicate(timeout=60)[0].split()[-1] == str(entry)
    assert (entry / "kernel.so").read_text() == "mine"  # first come, kept
    assert rooms(cache_dir) == {"kernels": 1, "building": 0}


def damage_flip(entry):
    data = bytearray((entry / "kernel.so").read_bytes())
    data[1] ^= 1
    (entry / "kernel.so").write_bytes(data)


def edit(entry, manifest):
    (entry / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    "one flipped bit": (damage_flip, "kernel.so has sha256"),
    "a cut file": (lambda entry: (entry / "kernel.so").write_text(""), "kernel.so has sha256"),
    "a missing file": (lambda entry: (entry / "report.json").unlink(), "report.json cannot be read"),
    "no manifest": (lambda entry: (entry / "manifest.json").unlink(), "manifest.json cannot be read"),
    "a cut manifest": (lambda entry: (entry / "manifest.json").write_text('{"files": '), "manifest.json is damaged"),
    "an empty manifest": (lambda entry: (entry / "manifest.json").write_text("[]"), "manifest.json is damaged"),
    "a manifest that is a number": (lambda entry: edit(entry, 5), "manifest.json is damaged"),
    "digests that are none": (lambda entry: edit(entry, {"files": {"kernel.so": 5}}), "manifest.json is damaged"),
    "a manifest of no files": (lambda entry: edit(entry, {"files": {}}), "has no sha256 of kernel.so, kernel.cu, rep"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_quarantined_and_rebuilt(cache_dir, kind):
    damage, words = DAMAGES[kind]
    damage(make())
    with pytest.raises(ValueError, match=words):
        cache.read_entry(cache_dir / cache.VERSION / "kernels" / KEY, {})
    assert cache.lookup(KEY) is None
    assert (make(text="new") / "kernel.so").read_text() == "new" and rooms(cache_dir) == {
        "kernels": 1,
        "building": 0,
        "quarantine": 1,
    }


@pytest.mark.parametrize("kind", ["its folder is read-only", "there can be no quarantine"])
def test_damage_that_cannot_be_moved_is_absent_and_named(cache_dir, monkeypatch, kind):
    entry, rename = make(), os.rename

    def refuse(source, place):
        if source == entry:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))
        return rename(source, place)

    damage_flip(entry)
    if kind == "its folder is read-only":
        monkeypatch.setattr(os, "rename", refuse)
    else:
        (cache_dir / cache.VERSION / "quarantine").touch()
    assert cache.lookup(KEY) is None
    with pytest.raises(CacheError, match=f"{KEY} is damaged and cannot be moved; remove it, or set TERRAZZO_CACHE_DIR"):
        make(text="new")
    assert rooms(cache_dir)["building"] == 0
    assert [row["ok"] for row in cache.verify()] == [False]


def test_a_damaged_entry_that_came_meanwhile_is_replaced(cache_dir):
    def build(folder):
        write_files(folder, "mine")
        (cache_dir / cache.VERSION / "kernels" / KEY).mkdir()
        (cache_dir / cache.VERSION / "kernels" / KEY / "kernel.so").touch()

    assert (cache.get_or_build(KEY, META, build) / "kernel.so").read_text() == "mine"
    assert rooms(cache_dir) == {"kernels": 1, "building": 0, "quarantine": 1} and cache.lookup(KEY) is not None


@pytest.mark.parametrize("step", ["build", "write_manifest", "flush", "rename", "mkdtemp", "sweep"])
def test_a_full_disk_is_a_clear_error(cache_dir, monkeypatch, step):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step != "build":
        holder = {"rename": os, "mkdtemp": folders.tempfile}.get(step, folders)
        monkeypatch.setattr(holder, step, full)
    words = f"kernel cache {cache_dir} cannot be written: .*No space left on device; .*TERRAZZO_CACHE_DIR"
    with pytest.raises(CacheError, match=words):
        cache.get_or_build(KEY, META, full if step == "build" else write_files)
    assert not any(rooms(cache_dir).values())


def test_list_verify_clear(cache_dir):
    assert cache.list_entries() == [] and cache.verify() == [] and cache.clear() == {"entries": 0, "bytes": 0}
    make("a" * 64)
    damage_flip(make("b" * 64))
    rows = cache.list_entries()
    assert [row["key"][0] for row in rows] == ["a", "b"] and rows[0]["registers"] == 40 and rows[0]["bytes"] > 0
    assert rows[0]["name"] == "n" and rows[0]["target"] == "sm_80" and time.time() - rows[0]["created"] < 60
    checked = cache.verify()
    assert [row["ok"] for row in checked] == [True, False] and "sha256" in checked[1]["problem"]
    freed = cache.clear()
    assert (
        freed["entries"] == 2
        and freed["bytes"] > 0
        and rooms(cache_dir) == {"kernels": 0, "building": 0, "quarantine": 0}
    )


@pytest.mark.parametrize(
    "manifest",
    [[], 5, {"request": 5, "created": 1}, {"request": {"name": "n", "target": "t", "params": 5}, "created": 1}],
    ids=json.dumps,
)
def test_damaged_manifests_are_listed_by_verify_alone(cache_dir, manifest):
    make("a" * 64)
    edit(make("b" * 64), manifest)
    assert [row["key"][0] for row in cache.list_entries()] == ["a"]
    assert [row["ok"] for row in cache.verify()] == [True, False]


@pytest.mark.parametrize("age", [-(10**8), 0, 10**8])
def test_leftovers_are_known_by_their_locks_whatever_the_clock_says(builds, cache_dir, age):
    """A killed build of another key is swept, a live one is not, be it made in 1970 or in 2100 by its time."""
    live, dead = start(BUILD_SECONDS="60"), start(BUILD_SECONDS="60", KEY="d" * 64)
    assert live.stdout.readline() == dead.stdout.readline() == "building\n"
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    building = cache_dir / cache.VERSION / "building"
    for folder in building.iterdir():
        os.utime(folder, (time.time() - age,) * 2)
    make("e" * 64)
    try:
        assert [folder.name[:2] for folder in building.iterdir()] == ["cc"]
        cache.clear()
        assert [folder.name[:2] for folder in building.iterdir()] == ["cc"]
    finally:
        live.send_signal(signal.SIGKILL)
        live.wait()
    cache.clear()
    assert not list(building.iterdir())


def test_a_failed_build_leaves_nothing(cache_dir):
    def build(folder):
        (folder / "kernel.so").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_build(KEY, META, build)
    assert rooms(cache_dir) == {"kernels": 0, "building": 0}


def test_an_unusable_folder_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="TERRAZZO_CACHE_DIR"):
        make()


def test_a_relative_folder_does_not_move_with_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", f"cache-of-{tmp_path.name}")  # a name that no other test has resolved
    monkeypatch.chdir(tmp_path)
    entry = make()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert entry.is_relative_to(tmp_path) and (entry / "kernel.so").is_file() and cache.lookup(KEY) == entry
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", f"other-of-{tmp_path.name}")
    assert cache.cache_root() == tmp_path / "elsewhere" / f"other-of-{tmp_path.name}"


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", "~/kernels")
    assert cache.cache_root() == tmp_path / "kernels"
    monkeypatch.delenv("TERRAZZO_CACHE_DIR")
    assert cache.cache_root() == tmp_path / ".cache" / "terrazzo"


def test_no_home_is_a_clear_error(monkeypatch):
    def absent(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("TERRAZZO_CACHE_DIR", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", absent)
    with pytest.raises(CacheError, match="home directory.*; set TERRAZZO_CACHE_DIR"):
        make()
    report = environment_report()
    assert report["cache"]["path"] is None
    assert any("TERRAZZO_CACHE_DIR" in row["remedy"] for row in report["missing"])
