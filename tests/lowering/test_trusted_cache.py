"""Whose code the kernel cache runs, what it removes, and the places that it runs in."""

import errno
import json
import os
import shutil
import stat

import pytest
from fake_kernels import (
    GEMM,
    OTHER,
    SCALE,
    fake_entry,
    find,
    key_of,
    manifest_of,
    needs_root,
    rehash,
    swap,
    write_manifest_of,
)
from lowering_tools import needs_compiler, run_python
from terrazzo.lowering import cache, folders, kernels
from terrazzo.lowering.errors import CacheError

LEVELS = {
    "root": lambda entry: entry.parents[2],
    "version": lambda entry: entry.parents[1],
    "room": lambda entry: entry.parent,
    "entry": lambda entry: entry,
    "code": lambda entry: entry / "kernel.so",
    "manifest": lambda entry: entry / "manifest.json",
}


@needs_root
@pytest.mark.parametrize("level", LEVELS)
def test_another_users_code_is_refused_by_name(cache_dir, level):
    os.chown(LEVELS[level](fake_entry(SCALE)), OTHER, -1)
    with pytest.raises(CacheError, match=rf"belongs to user {OTHER}, neither to user root nor to root, so"):
        find(SCALE)
    with pytest.raises(CacheError, match=f"belongs to user {OTHER}"):
        fake_entry(SCALE)
    if level in ("entry", "code", "manifest"):
        (row,) = cache.verify()
        assert (
            not row["ok"] and f"user {OTHER}" in row["problem"] and (cache_dir / "v2" / "kernels" / row["key"]).is_dir()
        )


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720, 0o702, 0o1777])
@pytest.mark.parametrize("level", LEVELS)
def test_what_others_may_write_is_refused(cache_dir, level, mode):
    place = LEVELS[level](fake_entry(SCALE))
    place.chmod(mode)
    with pytest.raises(CacheError, match=f"may be written by others, its mode is {mode:04o}, so"):
        find(SCALE)
    place.chmod(0o755)
    assert find(SCALE) is not None  # others may read


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_folders_and_files_are_made_for_their_user_alone(tmp_path, monkeypatch, umask):
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "above" / "cache"))
    before = os.umask(umask)
    try:
        entry = fake_entry(SCALE)
        (entry / "kernel.so").write_bytes(b"damage")
        assert find(SCALE) is None  # and so there is a quarantine
        fake_entry(SCALE)
        cache.room(cache.VERSION, "loading"), cache.tilelang_folder()
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path): stat.S_IMODE(path.lstat().st_mode) for path in (tmp_path / "above").rglob("*")}
    assert {name.name for name in modes} >= {"cache", "v2", "kernels", "locks", "building", "quarantine", "tilelang"}
    damaged = [name for name in modes if "quarantine" in name.parts and name.name == "kernel.so"]
    assert len(damaged) == 1
    for name, mode in modes.items():
        assert mode == (0o700 if (tmp_path / name).is_dir() else 0o600), name
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o700


def test_folders_that_are_there_are_left_as_they_are(tmp_path):
    (tmp_path / "there").mkdir(mode=0o755)
    folders.make_folders(tmp_path / "there" / "new")
    folders.make_folders(tmp_path / "there" / "new")
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o755
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "new"):
        with pytest.raises(NotADirectoryError, match="file"):
            folders.make_folders(place)


@pytest.fixture
def precious(tmp_path):
    """A folder that must survive, with names that a build or a quarantine could have."""
    home = tmp_path / "home"
    for name in ("letters", f"{'c' * 64}.abcdefgh", "d" * 64, f"{'d' * 64}.0123"):
        (home / name).mkdir(parents=True)
        (home / name / "text").write_text("mine")
    yield home
    assert sorted(path.name for path in home.rglob("text")) == ["text"] * 4


@pytest.mark.parametrize("place", ["v2", "v2/kernels", "v2/building", "v2/quarantine", "v2/locks"])
def test_links_in_the_place_of_folders_are_refused(cache_dir, precious, place):
    fake_entry(GEMM)
    link = cache_dir / place
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(precious)
    with pytest.raises(CacheError, match=f"{link} is a link where a folder must be; remove it"):
        fake_entry(SCALE)
        (cache_dir / "v2" / "kernels" / key_of(GEMM) / "kernel.so").write_bytes(b"damage")
        cache.room("v2", "quarantine")
    if place not in ("v2/locks",):
        with pytest.raises(CacheError, match="is a link"):
            cache.clear()


def test_the_cache_itself_may_be_a_link(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "cache"))
    assert find(SCALE) is None and fake_entry(SCALE) == find(SCALE) and (tmp_path / "disk" / "v2").is_dir()


def test_an_entry_that_is_a_link_is_refused(cache_dir):
    entry = fake_entry(SCALE)
    entry.rename(cache_dir / "elsewhere")
    entry.symlink_to(cache_dir / "elsewhere")
    with pytest.raises(CacheError, match=f"{entry} is a link, so it could be another user's code; remove {entry}"):
        find(SCALE)
    cache.clear()
    assert entry.is_symlink() and (cache_dir / "elsewhere" / "kernel.so").is_file()


def test_only_names_that_were_made_here_are_removed(cache_dir, precious):
    fake_entry(SCALE)
    rooms = cache_dir / "v2"
    (rooms / "quarantine").mkdir(mode=0o700)
    kept = [rooms / "kernels" / "notes", rooms / "building" / "notes", rooms / "quarantine" / "notes"]
    kept += [rooms / "building" / f"notes.{'a' * 8}", cache_dir / "tuning"]
    for folder in kept:
        folder.mkdir()
        (folder / "text").touch()
    links = [rooms / "kernels" / ("a" * 64), rooms / "building" / f"{'a' * 64}.abcdefgh"]
    links += [rooms / "quarantine" / f"{'a' * 64}.0123"]
    for link in links:
        link.symlink_to(precious)
    assert cache.clear()["entries"] == 1
    fake_entry(SCALE)  # sweeps building/
    assert all((folder / "text").exists() for folder in kept) and all(link.is_symlink() for link in links)
    assert [row["problem"] for row in cache.verify() if row["key"] == "notes"] == [f"{kept[0]} was not made here"]


def test_an_older_cache_is_never_read_and_is_cleared(cache_dir):
    entry = fake_entry(SCALE)
    (cache_dir / "v1").mkdir()
    shutil.move(cache_dir / "v2" / "kernels", cache_dir / "v1" / "kernels")
    assert find(SCALE) is None and cache.list_entries() == [] and cache.verify() == []
    assert cache.clear()["entries"] == 1 and not (cache_dir / "v1" / "kernels" / entry.name).exists()


@pytest.mark.parametrize("what", ["folders", "code, with its sha256", "all but the key", "keys"])
def test_an_entry_of_another_kernel_is_found_out(cache_dir, what):
    left, right = fake_entry(SCALE), fake_entry(GEMM)
    if what == "code, with its sha256":
        swap(left / "kernel.so", right / "kernel.so")
        rehash(left)
        rehash(right)
    else:
        swap(left, right)
    if what in ("all but the key", "keys"):
        for folder in (left, right):
            write_manifest_of(folder, {**manifest_of(folder), "key": folder.name})
    if what == "keys":  # and the manifests say the other's identity and request too
        ours, others = manifest_of(left), manifest_of(right)
        for folder, names in ((left, others), (right, ours)):
            own = {name: names[name] for name in ("identity", "request")}
            write_manifest_of(folder, {**manifest_of(folder), **own})
    assert find(SCALE) is None and find(GEMM) is None
    assert fake_entry(SCALE) == left and str(SCALE).encode() in (left / "kernel.so").read_bytes()
    assert len(list((cache_dir / "v2" / "quarantine").iterdir())) == 2


@pytest.mark.parametrize("name", ["identity", "request", "toolchain", "key"])
def test_an_entry_that_says_nothing_of_itself_is_not_believed(cache_dir, name):
    entry = fake_entry(SCALE)
    manifest = manifest_of(entry)
    write_manifest_of(entry, {key: value for key, value in manifest.items() if key != name})
    assert find(SCALE) is None


def test_true_is_not_one_in_a_request(cache_dir):
    entry = fake_entry(SCALE)
    manifest = manifest_of(entry)
    write_manifest_of(entry, {**manifest, "request": {**manifest["request"], "flags": [], "params": {"n": True}}})
    assert find(SCALE) is None


DAMAGED = {
    "deep": '{"files": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep objects": '{"files": ' + '{"a":' * 5_000 + "1" + "}" * 5_000 + "}",
    "deep enough for repr": '{"files": {}, "request": ' + "[" * 900 + "]" * 900 + "}",
    "5,000 digits": '{"files": {}, "created": ' + "9" * 5000 + "}",
    "no UTF-8": b'{"files": "\xff"}',
    "UTF-16": '{"files": {}}'.encode("utf-16"),
    "a lone surrogate": '{"files": {"\\ud800": "x"}}',
    "a path out": '{"files": {"kernel.so": "", "kernel.cu": "", "report.json": "", "../manifest.json": ""}}',
    "an absolute path": '{"files": {"kernel.so": "", "kernel.cu": "", "report.json": "", "/etc/passwd": ""}}',
    "a name with a zero": '{"files": {"kernel.so": "", "kernel.cu": "", "report.json": "", "a\\u0000": ""}}',
    "too much": " " * (folders.MANIFEST_BYTES + 1),
    "nothing": "",
    "a folder": None,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_manifest_is_quarantined_whatever_is_wrong_with_it(cache_dir, kind):
    entry, text = fake_entry(SCALE), DAMAGED[kind]
    place = entry / "manifest.json"
    place.unlink()
    place.mkdir() if text is None else place.write_bytes(text.encode() if isinstance(text, str) else text)
    place.chmod(0o700)
    assert cache.list_entries() == [] and find(SCALE) is None
    assert len(list((cache_dir / "v2" / "quarantine").iterdir())) == 1 and fake_entry(SCALE) == find(SCALE)


@pytest.mark.parametrize("name", ["manifest.json", "kernel.so", "kernel.cu"])
@pytest.mark.parametrize("kind", ["a link", "a pipe", "a device"])
def test_what_is_no_plain_file_is_not_opened(cache_dir, name, kind):
    place = fake_entry(SCALE) / name
    place.rename(place.with_name("moved"))
    if kind == "a link":
        place.symlink_to("moved")
    elif kind == "a pipe":
        os.mkfifo(place, 0o600)  # opening it for reading would wait for a writer
    else:
        try:
            os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero never ends
        except PermissionError:
            pytest.skip("this user cannot make devices")
    with pytest.raises(ValueError, match=f"{name} is {kind}"):
        cache.read_entry(place.parent, {})
    assert find(SCALE) is None


def test_a_file_that_is_too_long_is_not_read(cache_dir):
    entry = fake_entry(SCALE)
    os.truncate(entry / "kernel.so", folders.FILE_BYTES + 1)
    with pytest.raises(ValueError, match=r"kernel\.so is longer than \d+ bytes"):
        cache.read_entry(entry, {})


@pytest.mark.parametrize("call", [cache.list_entries, cache.verify, cache.clear], ids=lambda call: call.__name__)
def test_a_cache_that_is_a_file_is_an_error(tmp_path, monkeypatch, call):
    (tmp_path / "file").touch(mode=0o600)
    monkeypatch.setenv("TERRAZZO_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="file is a file where a folder must be"):
        call()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_clearing_a_read_only_cache_says_so(cache_dir, monkeypatch, code):
    fake_entry(SCALE)

    def refuse(folder):
        raise OSError(code, os.strerror(code), str(folder))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(
        CacheError, match=r"cannot be cleared: .*; it is read-only for this user, 0 entries were removed"
    ):
        cache.clear()


def test_a_disk_that_flushes_no_folders_serves(cache_dir, monkeypatch):
    fsync = os.fsync

    def refuse(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    assert fake_entry(SCALE) == find(SCALE)


def test_a_disk_without_locks_serves_and_is_not_swept(cache_dir, monkeypatch):
    (cache_dir / "v2" / "building" / f"{'a' * 64}.abcdefgh").mkdir(parents=True, mode=0o700)
    for folder in (cache_dir, cache_dir / "v2", cache_dir / "v2" / "building"):
        folder.chmod(0o700)
    (cache_dir / "v2" / "building" / f"{'a' * 64}.abcdefgh" / ".lock").touch(mode=0o600)

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    with cache.key_lock("a" * 64, 0.0):
        assert fake_entry(SCALE) == find(SCALE)
    assert len(list((cache_dir / "v2" / "building").iterdir())) == 1


def test_a_full_folder_for_temporary_files_is_named(cache_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "full"))

    def build(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "full" / "x.cu"))

    with pytest.raises(CacheError, match=rf"temporary files cannot be written: .*{tmp_path}/full/x.*; .*set TMPDIR to"):
        cache.get_or_build("e" * 64, {}, build)


@pytest.mark.parametrize("full", ["tmp", "cache"])
def test_a_write_that_names_no_file_is_told_by_what_is_full(cache_dir, tmp_path, monkeypatch, full):
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(cache, "_is_full", lambda folder: folder.name == full)

    def build(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as file.write() says it

    with pytest.raises(CacheError, match="set TMPDIR to" if full == "tmp" else "set TERRAZZO_CACHE_DIR to"):
        cache.get_or_build("e" * 64, {}, build)


@pytest.mark.parametrize("age", [-(10**9), 10**9])
def test_a_half_removed_leftover_is_removed_and_a_live_folder_is_not(tmp_path, age):
    (tmp_path / "build.abcdefgh").mkdir()
    (tmp_path / "build.abcdefgh" / "kernel.cu").touch()  # its lock went first
    (tmp_path / "build.01234567").mkdir()  # killed before it was locked
    with folders.private_folder(tmp_path, "build") as live:
        os.utime(live, (age, 10**9 + age))
        folders.sweep(tmp_path, "build")
        assert [path.name for path in tmp_path.iterdir()] == [live.name]
    assert not list(tmp_path.iterdir())


def test_a_new_folder_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    mkdtemp, made = folders.tempfile.mkdtemp, []

    def swept(**options):
        made.append(mkdtemp(**options))
        if len(made) == 1:
            folders.sweep(tmp_path, "build")
        return made[-1]

    monkeypatch.setattr(folders.tempfile, "mkdtemp", swept)
    with folders.private_folder(tmp_path, "build") as folder:
        assert len(made) == 2 and folder.is_dir() and (folder / ".lock").exists()


def test_a_copy_to_load_is_private_and_gone_afterwards(tmp_path):
    tmp_path.chmod(0o777)
    before = os.umask(0)
    try:
        with folders.private_copy(b"code", [tmp_path]) as copy:
            assert copy.read_bytes() == b"code" and stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert not list(tmp_path.iterdir())


def test_a_copy_lies_where_code_may_be_run_and_there_is_room(tmp_path, monkeypatch):
    statvfs, full = os.statvfs, tmp_path / "full"
    for name in ("noexec", "full", "good"):
        (tmp_path / name).mkdir()

    class Noexec:
        f_flag = os.ST_NOEXEC

    opened = os.open

    def no_room(path, *rest, **options):
        if str(path).startswith(str(full)) and str(path).endswith("kernel.so"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, *rest, **options)

    monkeypatch.setattr(os, "statvfs", lambda place: Noexec() if place.name == "noexec" else statvfs(place))
    monkeypatch.setattr(os, "open", no_room)
    places = [tmp_path / name for name in ("absent", "noexec", "full", "good")]
    with folders.private_copy(b"code", places) as copy:
        assert copy.parents[1] == tmp_path / "good"
    assert not list(full.iterdir())
    with pytest.raises(OSError, match=r"absent: No such file.*; .*noexec: mounted noexec; .*full: No space left"):
        with folders.private_copy(b"code", places[:3]):
            raise AssertionError("there is no place")


def test_a_kernel_that_no_folder_can_hold_says_what_to_set(cache_dir, monkeypatch):
    fake_entry(SCALE)
    monkeypatch.setattr(kernels, "_places", list)
    with pytest.raises(CacheError, match=r"test\.scale.*cannot be loaded: no folder holds.*set TMPDIR to a folder"):
        kernels.get_kernel(SCALE)


@needs_compiler
@pytest.mark.compiles
def test_a_kernel_is_compiled_where_home_and_tmpdir_cannot_be_written_and_streams_are_closed(tmp_path):
    code = """
import os
os.close(0)
os.close(1)
from lowering_tools import request_for
from terrazzo.lowering import get_kernel
kernel = get_kernel(request_for("scale"))
import tilelang
assert kernel.report.registers > 0 and "TILELANG_CACHE_DIR" not in os.environ
os.write(2, str(tilelang.env.TILELANG_CACHE_DIR).encode())
"""
    cache_dir = tmp_path / "cache"
    done = run_python(code, HOME="/dev/null/home", TMPDIR="/dev/null/tmp", TERRAZZO_CACHE_DIR=str(cache_dir))
    assert done.returncode == 0 and done.stderr.endswith(str(cache_dir / "tilelang")), done.stderr
    assert stat.S_IMODE((cache_dir / "tilelang").stat().st_mode) == 0o700
    assert not list((cache_dir / "v2" / "building").iterdir())


def test_tilelangs_own_folder_may_be_chosen(cache_dir, monkeypatch):
    assert cache.tilelang_folder() == str(cache_dir / "tilelang")
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/elsewhere")
    assert cache.tilelang_folder() == "/elsewhere"


@needs_compiler
@pytest.mark.compiles
def test_code_that_is_cut_short_after_loading_ends_no_process(compiled, tmp_path, monkeypatch):
    """A mapped file that is cut short would end the process by SIGBUS at its next page."""
    entry = shutil.copytree(compiled(SCALE), tmp_path / "cache" / "v2" / "kernels" / key_of(SCALE))
    for folder in entry.parents[:3]:
        folder.chmod(0o700)
    code = """
import os, sys
import torch
from lowering_tools import request_for
from terrazzo.lowering import get_kernel
from terrazzo.lowering.errors import ArgumentError
kernel = get_kernel(request_for("scale"))
os.truncate(kernel.folder / "kernel.so", 0)
for _ in range(3):
    try:
        kernel(torch.zeros(4, 256), torch.zeros(4, 256), 1, 2.0)
    except ArgumentError as error:
        print("alive")
print(sum("(deleted)" in line for line in open("/proc/self/maps") if "kernel.so" in line) > 0)
"""
    done = run_python(code, TERRAZZO_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path))
    assert done.returncode == 0 and done.stdout.split() == ["alive"] * 3 + ["True"], done.stderr
    assert not list(tmp_path.glob("terrazzo-load*"))


def test_an_entry_cleared_at_the_wrong_moment_is_compiled_again(cache_dir, monkeypatch):
    fake_entry(SCALE)
    compile_request, calls = kernels.compile_request, []

    def then_cleared(request, count):
        entry = compile_request(request) if not calls else fake_entry(request)
        calls.append(entry)
        if len(calls) == 1:
            cache.clear()
        return entry

    monkeypatch.setattr(kernels, "compile_request", then_cleared)
    assert kernels._cached_code(SCALE)[1].startswith(str(SCALE).encode()) and len(calls) == 2


def test_reports_of_entries_are_checked(cache_dir):
    entry = fake_entry(SCALE)
    (entry / "report.json").write_text(json.dumps({"registers": "many"}))
    assert cache.list_entries() == []
