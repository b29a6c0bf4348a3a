"""The report in a real browser: it fits a phone, draws everything, and asks for nothing else."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from terrazzo import commands_tune
from terrazzo.autotune import operators, report, runner
from terrazzo.autotune.database import Database, Machine, Problem, Trial, best
from terrazzo.autotune.jobs import Job
from terrazzo.lowering.targets import Target

H200 = Target.parse("nvidia/nvidia-h200")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 390
FACTS = {"n": 512, "k": 1024, "group": 128, "symmetric": False, "scale_dtype": "float16", "dtype": "float16"}
# The page in a frame as wide as a phone; the title of the outer page says what it measured.
FRAME = """<!doctype html><body><iframe style="width:{width}px;height:844px;border:0" src="{page}"></iframe><script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, root = page.documentElement, view = event.target.contentWindow;
  const wide = [...page.querySelectorAll("p, h1, h2, svg, .wide")].filter(
    it => it.getBoundingClientRect().right > root.clientWidth + 1).length;
  const text = [...page.querySelectorAll("svg text")].filter(it => it.textContent.trim());
  const smallest = Math.min(...text.map(it => it.getBoundingClientRect().height));
  const loaded = view.performance.getEntriesByType("resource").length;
  document.title = [root.scrollWidth - root.clientWidth, wide, page.querySelectorAll("svg").length,
    page.querySelectorAll("tbody tr").length, smallest.toFixed(1), loaded].join(" ");
}};
</script>"""


def chromium(*arguments: str) -> str:
    """What a headless browser prints."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A report of every operator, with times that follow the cost models."""
    pytest.importorskip("matplotlib", reason="the tune extra is not installed")
    folder = tmp_path_factory.mktemp("report")
    machine = Machine("sm_90a", H200.name, 132, "580.1", "13.0", "2.13", "0.1.15", "0.1.0", "abc")
    job = Job(ops=tuple(operators.OPERATORS), shapes=((4096, 14336), (28672, 4096)), m=(16, 256), most=4)
    with Database(folder / "t.db") as database:
        for problem in job.problems():
            roof = operators.get_operator(problem.op).roofline(problem, H200)
            for at, it in enumerate(runner.candidates(problem, H200, job)):
                us = max(it.us, roof.us) * (1.2, 1.0, 1.1, 1.3)[at]
                own = dict(role="search" if at else "heuristic", bound=roof.bound, bound_us=roof.us)
                own |= dict(predicted_us=it.us, uid=f"{problem}:{at}", job="job")
                params = tuple(sorted(it.params.items()))
                database.add([Trial(problem, it.program, params, machine, "ok", us, 0.01, **own)])
        report.write_report(database, folder / "report.html")
    return folder / "report.html"


def test_every_operator_has_its_row(page):
    found = re.findall(r"<tr>.*?</tr>", page.read_text())
    for op in operators.OPERATORS:
        gains = [float(gain) for row in found if f">{op}</td>" in row for gain in re.findall(r">(1\.\d+)<", row)]
        assert gains and max(gains) > 1, op  # heuristic over best


def test_a_mean_counts_the_problems_that_are_in_it():
    """Records without their heuristic's time are not of them, as in `terrazzo tune best`."""
    machine, trials = Machine("sm_90a", H200.name, 132), []
    for m in (8, 16, 32):
        problem = Problem.of("w4a16", dict(FACTS), m)
        roles = ("confirm",) if m == 8 else ("heuristic", "confirm")
        trials += [Trial(problem, "p", (), machine, "ok", 9.0, role=role, uid=f"{m} {role}") for role in roles]
    ((op, count, gain, *_),) = report.summary_rows(report.points_of(trials, {}))
    assert (op, count, gain) == ("w4a16", 2, pytest.approx(1.0))
    assert f"geometric mean of {count} problems" in commands_tune._gains(best(trials))[0]


def test_what_nothing_was_compared_with_has_no_legend(recwarn):
    """matplotlib warns of a legend without entries."""
    axes = pytest.importorskip("matplotlib.figure", reason="the tune extra is not installed").Figure().subplots()
    report.gains(axes, [], [], H200)
    assert axes.get_legend() is None and not recwarn.list
    report.curves(axes, [], [], H200)
    assert axes.get_legend() is not None


def test_curves_are_what_a_share_of_the_problems_is_within():
    """Of ten problems one begins at twice its best: the median and 90 % are at once, 99 % take two trials."""
    axes = pytest.importorskip("matplotlib.figure", reason="the tune extra is not installed").Figure().subplots()
    machine, trials = Machine("sm_90a", H200.name, 132), []
    for m in range(1, 11):
        problem = Problem.of("w4a16", {"n": 512, "k": 1024}, m)
        times = (4.0, 2.0) if m == 7 else (2.0, 3.0)
        trials += [Trial(problem, "p", (), machine, "ok", us, uid=f"{m} {at}") for at, us in enumerate(times)]
    report.curves(axes, [], trials, H200)
    found = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert found == {"median": [1, 1], "90% of problems": [1, 1], "99% of problems": [2, 1]}


@pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium")
def test_a_phone_shows_the_report_without_scrolling_sideways(page):
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(width=PHONE, page=page.name))
    said = chromium("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom", frame.as_uri())
    title = re.search(r"<title>(.*?)</title>", said)
    assert title, said[-2000:]
    beyond, wide, drawings, rows, smallest, loaded = map(float, title.group(1).split())
    assert beyond == 0 and wide == 0, "the page is wider than the screen"
    assert drawings == 3 and rows > 40 and loaded == 0
    assert smallest >= 7.0, "labels of a drawing are too small to read"


@pytest.mark.skipif(BROWSER is None, reason="no browser: install chromium")
def test_a_browser_draws_the_report(page):
    """A screenshot of the size asked for, whose pixels are not one colour."""
    picture = page.with_name("phone.png")
    chromium(f"--window-size={PHONE},844", f"--screenshot={picture}", page.as_uri())
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (PHONE, 844)
    assert len(data) > 20_000  # an empty page compresses to a few hundred bytes
