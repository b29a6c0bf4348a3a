"""Readers of manifests, reports and bundles under seeded damage: the right answer, or an error of ours."""

import json
import os
import shutil
from contextlib import suppress

import mutation
from fake_kernels import GEMM, REPORT, SCALE, fake_bundle, fake_entry, find, manifest_of, rehash
from terrazzo.lowering import KernelReport, cache, folders, kernels, load_bundle
from terrazzo.lowering.errors import CacheError


def write(path, data):
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_bytes(data)
    path.chmod(0o644)


def damage_file(folder, random):
    """Damage to one file of a folder: its bytes, its kind, its mode, its place."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, kind = (
        random.choice(files),
        random.choice(("bytes", "bytes", "gone", "link", "pipe", "folder", "mode", "swap")),
    )
    if kind == "bytes":
        path.write_bytes(mutation.data(path.read_bytes(), random))
    elif kind == "mode":
        path.chmod(random.choice((0, 0o600, 0o666, 0o622, 0o4755)))
    elif kind == "swap":
        other = random.choice(files)
        left, right = path.read_bytes(), other.read_bytes()
        path.write_bytes(right)
        other.write_bytes(left)
        if random.random() < 0.5 and folders.MANIFEST not in (path.name, other.name):
            rehash(folder)
    else:
        path.unlink()
        if kind == "link":
            path.symlink_to(random.choice(("/etc/passwd", "/dev/zero", path.name, *map(str, files))))
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()


def copy_of(original, place):
    shutil.rmtree(place, ignore_errors=True)
    return shutil.copytree(original, place)


def test_bundles_with_damaged_manifests(cache_dir, tmp_path, tries):
    original = fake_bundle(tmp_path / "original", SCALE, GEMM)
    bundle, good = copy_of(original, tmp_path / "bundle"), manifest_of(original)
    taken = []
    for random in tries(300):
        write(bundle / "manifest.json", mutation.text(mutation.value(good, random), random))
        kernels.forget_kernels()
        taken.append(mutation.survives(lambda: load_bundle(bundle, "sm_80")))
        if taken[-1]:
            check_bundled()
    assert 0 < sum(taken) < len(taken) / 2  # some changes mean nothing: another toolchain, a changed name of a layout


def check_bundled():
    """Whatever was loaded is the code of the request that finds it."""
    for request in (SCALE, GEMM):
        bundled = kernels._find_bundled(request)
        if bundled is not None:
            assert bundled.code().startswith(str(request).encode())


def test_bundles_with_damaged_files(cache_dir, tmp_path, tries):
    original = fake_bundle(tmp_path / "original", SCALE, GEMM)
    for random in tries(100):
        bundle = copy_of(original, tmp_path / "bundle")
        damage_file(bundle, random)
        kernels.forget_kernels()
        if mutation.survives(lambda bundle=bundle: load_bundle(bundle, "sm_80")):
            check_bundled()
            damage_file(bundle, random)  # after it was verified
            mutation.survives(check_bundled)


def test_damaged_cache_entries(cache_dir, tmp_path, tries):
    entry = fake_entry(SCALE)
    original, good = shutil.copytree(entry, tmp_path / "original"), manifest_of(entry)
    for case, random in enumerate(tries(100)):
        if entry.parent.is_dir():
            copy_of(original, entry)
        if random.random() < 0.5:
            write(entry / "manifest.json", mutation.text(mutation.value(good, random), random))
        else:
            damage_file(entry, random)
        mutation.survives(cache.list_entries)
        with suppress(CacheError):  # others may write it
            found = find(SCALE)
            if found is not None:
                contents = cache.read_entry(found, {})[1]
                assert contents["kernel.so"].startswith(str(SCALE).encode())
        if case % 8 == 0:
            mutation.survives(cache.verify)
            mutation.survives(cache.clear)
            fake_entry(SCALE)


def test_damaged_reports(tries):
    good, taken = REPORT.as_dict(), []
    for random in tries(300):
        taken.append(False)
        with suppress(ValueError):
            report = KernelReport.parse(mutation.text(mutation.value(good, random), random), "report.json")
            taken[-1] = True
            assert report == KernelReport(**json.loads(json.dumps(report.as_dict())))
            assert report.count("HMMA") + report.registers + report.spill_stores >= 0 and report.note + "" is not None
    assert 0 < sum(taken) < len(taken)


def test_damaged_requests_of_bundles(cache_dir, tmp_path, tries):
    """Damage inside a kernel's request alone, with everything around it right."""
    bundle = fake_bundle(tmp_path / "bundle", SCALE, GEMM)
    good = manifest_of(bundle)
    for random in tries(300):
        manifest = json.loads(json.dumps(good))
        kernel = random.choice(manifest["kernels"])
        kernel["request"] = mutation.value(kernel["request"], random)
        write(bundle / "manifest.json", json.dumps(manifest).encode())
        kernels.forget_kernels()
        if mutation.survives(lambda: load_bundle(bundle, "sm_80")):
            check_bundled()
