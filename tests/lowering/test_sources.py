"""A kernel's identity follows the text that it is built from, and nothing else."""

import os
import sys

import pytest
from lowering_tools import run_python
from terrazzo.lowering import sources
from terrazzo.lowering.errors import ArgumentError

COMPILER = "terrazzo.lowering.compiler"
PROGRAM = '''"""A program."""

import math

from terrazzo.layouts import shapes


def build(target):
    """Builds."""
    cuda = """
    // tz_add  # not Python
    int add(int a) { return a + 1; }
    """
    return shapes.SIZE, cuda  # a remark
'''
FILES = {
    "layouts/__init__": "from terrazzo.layouts.shapes import SIZE",
    "layouts/shapes": "SIZE = 4",
    "lowering/__init__": "",
    "lowering/compiler": "LEVEL = 3",
    "ops/__init__": "def __getattr__(name): ...",
    "ops/family/__init__": "def __getattr__(name): ...",
    "ops/family/program": PROGRAM,
    "ops/family/other": "NUMBER = 1",
    "schedules/__init__": "",
    "schedules/tiles": "WIDTH = 64",
}


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """digest(changes) of the builder in `ops/family/program`, where `changes` replace the text of some files."""

    def take(changes=None, module="terrazzo.ops.family.program"):
        for name, text in {**FILES, **(changes or {})}.items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found = {}
        for name in FILES:
            path = tmp_path / f"{name}.py"
            found[f"terrazzo.{name.removesuffix('/__init__').replace('/', '.')}"] = path, sources._stamp(path)
        monkeypatch.setattr(sources, "_SOURCES", found)
        forget()
        return sources.source_digest(module)

    yield take
    monkeypatch.undo()
    forget()


def forget():
    for function in (sources.source_digest, sources._read, sources._modules_behind, sources.files_digest):
        function.cache_clear()
    sources._known.clear()


@pytest.mark.parametrize(
    "text",
    [
        PROGRAM.replace("  # a remark", ""),
        PROGRAM.replace("a remark", "another"),
        PROGRAM.replace("A program.", "Another.\n\nIn several 'lines' # of text."),
        PROGRAM.replace('    """Builds."""\n', ""),
        PROGRAM.replace("\n\n\n", "\n\n# a comment\n\n\n"),
        PROGRAM.replace("import math\n", "import math   \n"),
        f"{PROGRAM}\n\n'a string that stands alone'\n",
    ],
)
def test_comments_and_docstrings_do_not_count(digest, text):
    assert text != PROGRAM and digest({"ops/family/program": text}) == digest()


@pytest.mark.parametrize(
    "text",
    [
        PROGRAM.replace("a + 1", "a + 2"),
        PROGRAM.replace("// tz_add", "// tz_sub"),
        PROGRAM.replace("# not Python", "# not C"),
        PROGRAM.replace("SIZE, cuda", "SIZE + 1, cuda"),
        PROGRAM.replace("build(target)", "build(target, n=1)"),
        PROGRAM.replace("return", "url = 'a#b'\n    return"),
        PROGRAM.replace("    return", "    if target:\n        cuda += 'x'\n    return"),
    ],
)
def test_code_and_text_in_strings_count(digest, text):
    assert text != PROGRAM and digest({"ops/family/program": text}) != digest()


def test_a_string_with_a_number_sign_is_no_comment(digest):
    texts = [PROGRAM.replace("return", f"url = {url}\n    return") for url in ("'a#b'", "'a#c'", '"it\'s #1"')]
    assert len({digest({"ops/family/program": text}) for text in texts}) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "from terrazzo.schedules import tiles",
        "from terrazzo.schedules.tiles import WIDTH",
        "import terrazzo.schedules.tiles",
        "def f():\n    from terrazzo.schedules.tiles import WIDTH",
        "try:\n    pass\nexcept ValueError:\n    import terrazzo.schedules.tiles",
        "HOME = 'terrazzo.schedules.tiles'",
        "ENTRY = 'terrazzo.schedules.tiles:build'",
    ],
)
def test_whatever_is_imported_counts_through_any_number_of_modules(digest, statement):
    without, changed = {"schedules/tiles": "WIDTH = 64"}, {"schedules/tiles": "WIDTH = 32"}
    assert digest(without) == digest(changed)
    far = {"layouts/shapes": f"{statement}\nSIZE = 4"}
    assert digest({**without, **far}) != digest({**changed, **far})


def test_what_only_type_checkers_import_does_not_count(digest):
    checked = {"layouts/shapes": "if TYPE_CHECKING:\n    import terrazzo.schedules.tiles\nSIZE = 4"}
    assert digest(checked) == digest({**checked, "schedules/tiles": "WIDTH = 32"})


def test_a_package_with_lazy_names_counts_as_all_of_it(digest):
    lazy = {"layouts/shapes": "from terrazzo.ops import family\nSIZE = family.NUMBER"}
    assert digest(lazy) != digest({**lazy, "ops/family/other": "NUMBER = 2"})


def test_neighbours_and_packages_on_the_way_do_not_count(digest):
    assert digest() == digest({"ops/family/other": "NUMBER = 2", "ops/family/__init__": "X = 1", "ops/__init__": ""})


def test_the_compiler_counts_for_every_kernel(digest):
    assert digest() != digest({"lowering/compiler": "LEVEL = 2"})


def test_a_file_that_changed_since_the_start_gives_a_name_of_this_process_alone(digest, tmp_path, monkeypatch):
    before = digest()
    (tmp_path / "layouts" / "shapes.py").write_text("SIZE = 16")
    forget()
    mine = sources.source_digest("terrazzo.ops.family.program")
    forget()
    monkeypatch.setattr(sources, "_OF_THIS_PROCESS", "another process")
    theirs = sources.source_digest("terrazzo.ops.family.program")
    assert len({before, mine, theirs, digest({"layouts/shapes": "SIZE = 16"})}) == 4


def test_a_builder_outside_counts_with_what_it_imports_of_terrazzo(digest, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outside.py").write_text("from terrazzo.schedules import tiles")
    before = digest(module="outside")
    assert before != digest({"schedules/tiles": "WIDTH = 32"}, module="outside")
    assert before == digest({"layouts/shapes": "SIZE = 8"}, module="outside")
    (tmp_path / "outside.py").write_text("from terrazzo.schedules import tiles as others")
    assert before != digest(module="outside")
    with pytest.raises(ArgumentError, match="no such module"):
        digest(module="no_such_module_anywhere")


def test_no_builder_imports_what_its_closure_lacks():
    """Importing each builder brings in nothing that its closure lacks, but for names that packages on the way bind."""
    code = f"""
import importlib, sys
from terrazzo.lowering import sources
builders = [name for name, (path, _) in sources._SOURCES.items() if "\\ndef build(" in path.read_text()]
assert len(builders) > 15, builders
on_the_way = sources.closure({{"terrazzo.layouts"}}) | {{"terrazzo.ops.lazy"}}
for builder in builders:
    for name in [name for name in sys.modules if name.split(".")[0] == "terrazzo" and name != sources.__name__]:
        del sys.modules[name]
    importlib.import_module(builder)
    loaded = {{name for name in sys.modules if name in sources._SOURCES and name != sources.__name__}}
    plain = {{name for name in loaded if sources._SOURCES[name][0].name != "__init__.py"}}
    extra = plain - sources.closure({{builder, {COMPILER!r}}}) - on_the_way
    assert not extra, (builder, extra)
    print(builder)
"""
    done = run_python(code)
    assert done.returncode == 0 and len(done.stdout.split()) > 15, done.stderr


def test_closures_hold_programs_and_no_host_code():
    found = sources.closure({"terrazzo.ops.linear.stream_k"})
    assert {"terrazzo.ops.tiles.cuda.memory", "terrazzo.layouts.converters.u4", "terrazzo.ops.tiles.calls"} <= found
    assert not {"terrazzo.ops.registry", "terrazzo.ops.weight_only.op", "terrazzo.ops.w4a16.importers"} & found


def test_importing_terrazzo_reads_no_source():
    done = run_python(
        "import pathlib\ndef refuse(*a, **k): raise AssertionError('a source was read')\n"
        "pathlib.Path.read_text = refuse\nimport terrazzo.lowering.request, terrazzo.ops.weight_only.op"
    )
    assert done.returncode == 0, done.stderr
    assert sys.modules["terrazzo.lowering.sources"] is sources


def test_digests_of_the_same_files_spare_parsing_them(digest):
    own = digest()
    known = sources.digests_of(["terrazzo.ops.family.program", "elsewhere.program"])
    assert known["modules"] == {"terrazzo.ops.family.program": own}
    forget()
    sources.learn(known)
    assert sources.source_digest("terrazzo.ops.family.program") == own
    assert sources._read.cache_info().currsize == 0


def test_digests_of_other_files_are_not_taken(digest, tmp_path):
    module = "terrazzo.ops.family.program"
    digest({"lowering/compiler": "LEVEL = 4"})
    known = sources.digests_of([module])
    own = digest()
    forget()
    sources.learn(known)
    assert (
        sources.source_digest("terrazzo.ops.family.program") == own != known["modules"]["terrazzo.ops.family.program"]
    )


def test_digests_are_not_taken_once_a_file_changed(digest, tmp_path):
    own = digest()
    known = sources.digests_of(["terrazzo.ops.family.program"])
    forget()
    os.utime(tmp_path / "lowering/compiler.py", ns=(1, 1))
    sources.learn(known)
    assert sources.source_digest("terrazzo.ops.family.program") != own


@pytest.mark.parametrize("damaged", [None, [], {}, {"files": ""}, {"modules": []}, {"files": 1, "modules": {"a": "b"}}])
def test_damaged_digests_are_left_alone(digest, damaged):
    own = digest()
    forget()
    sources.learn(damaged)
    assert not sources._known and sources.source_digest("terrazzo.ops.family.program") == own
