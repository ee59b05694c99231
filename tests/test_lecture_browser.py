"""Lectures as a browser shows them: slides that fit, a page for a telephone, and the speaker view."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.lectures.lecture import lecture_path, lecture_paths, read_lecture
from tools.lectures.slides import render

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
by_lecture = pytest.mark.parametrize("path", lecture_paths(), ids=lambda path: path.stem)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
TELEPHONE, DESK = 390, 1280

# What a page says of itself: whether it came up as slides, and which of them (or as a page: what of it) overflow
MEASURE = """
<script>addEventListener("load", () => setTimeout(() => {
  const said = [];
  const over = e => e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1;
  if (Reveal.isReady()) for (let i = 0; i < Reveal.getTotalSlides(); i++) {
    Reveal.slide(i);
    const slide = Reveal.getCurrentSlide();
    if ([slide, ...slide.querySelectorAll("pre, figure, .columns > div")].some(over)) said.push(i + 1);
    // Below is the number of the slide
    const foot = slide.getBoundingClientRect().bottom - parseFloat(getComputedStyle(slide).paddingBottom);
    const shown = [...slide.children].filter(e => e.checkVisibility());
    if (shown.some(e => e.getBoundingClientRect().bottom > foot + 1)) said.push(`low ${i + 1}`);
    const films = [...slide.querySelectorAll("iframe")].map(e => e.contentDocument.documentElement);
    if (films.some(over)) said.push(`film ${i + 1}`);
    // A tick of a notebook's picture has 11 points at 150 dots an inch
    const scale = e => Math.min(e.clientWidth / e.naturalWidth, e.clientHeight / e.naturalHeight);
    if ([...slide.querySelectorAll("img.day")].some(e => 11 / 72 * 150 * scale(e) < 16)) said.push(`small ${i + 1}`);
  }
  else {
    if (document.documentElement.scrollWidth > innerWidth) said.push("page");
    document.querySelectorAll("pre, figure").forEach(e => { if (over(e)) said.push(e.textContent.slice(0, 40)); });
  }
  parent.postMessage(`ready ${Reveal.isReady()} overflow [${said}]`, "*");
}, 500))</script></body>
"""
# A window as narrow as a telephone: Chromium's own are never under 500
FRAME = """<!doctype html><iframe src="page.html" width="{width}" height="720" style="border: 0"></iframe>
<script>onmessage = e => document.body.textContent = e.data</script>"""
SPEAK = """
<script>addEventListener("load", () => setTimeout(() => {
  const opened = window.open;
  let view;
  window.open = (...where) => view = opened(...where);
  Reveal.slide(SLIDE);
  document.dispatchEvent(new KeyboardEvent("keydown", {keyCode: 83, key: "s", bubbles: true}));
  setTimeout(() => {
    const box = selector => view.document.querySelector(selector).getBoundingClientRect();
    const notes = view.document.querySelector(".speaker-controls-notes .value");
    const all = view.document.querySelector("#speaker-controls");
    const over = all.scrollHeight - all.clientHeight;
    const beside = box("#current-slide").right <= box("#speaker-controls").left;
    const above = box("#current-slide").bottom <= box("#upcoming-slide").top;
    document.body.textContent = `speaker over ${over} beside ${beside} above ${above} notes [${notes.textContent}]`;
    view.close(); // or Chromium waits for it
  }, 1500);
}, 500))</script></body>
"""


def shown(text: str, added: str, directory: Path, width: int, page: str = "page.html") -> str:
    """The document of `page` after a while; `added` is a script at the end of page.html."""
    before, _, after = text.rpartition("</body>")
    (directory / "page.html").write_text(before + added + after, encoding="utf-8")
    (directory / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={max(width, 500)},900"]
    command += [f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=6000", "--enable-logging=stderr"]
    command += ["--disable-popup-blocking", "--dump-dom", (directory / page).as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # Chromium's own pages warn where there is no network
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "Slow network is detected" not in line]
    assert not said, said
    return done.stdout


def overflow(text: str, width: int, directory: Path) -> tuple[str, ...]:
    """Whether it came up as slides, and what overflows, in a window of that width."""
    found = re.search(
        r"ready (\w+) overflow \[(.*?)\]", shown(text, MEASURE, directory, width, "frame.html"), re.DOTALL
    )
    assert found is not None
    return found.groups()


@by_lecture
def test_every_slide_fits(path: Path, tmp_path: Path) -> None:
    assert overflow(render(read_lecture(path)), DESK, tmp_path) == ("true", "")


@by_lecture
def test_on_a_telephone_it_is_a_page_that_nothing_runs_out_of(path: Path, tmp_path: Path) -> None:
    assert overflow(render(read_lecture(path)), TELEPHONE, tmp_path) == ("false", "")


def test_too_much_is_noticed(tmp_path: Path) -> None:
    text = render(read_lecture(lecture_path(4)))
    narrow = text.replace("</head>", "<style>figure { max-width: 600px; }</style></head>")
    assert overflow(narrow, DESK, tmp_path)[1].split(",")[0] == "small 2"
    much = "<p>one line more</p>" * 30
    cramped = text.replace('<aside class="notes">', much + '<aside class="notes">', 1)
    assert overflow(cramped, DESK, tmp_path) == ("true", "1,low 1")
    race = render(read_lecture(lecture_path(5)))
    assert "minmax(126px" in race
    assert overflow(race.replace("minmax(126px", "minmax(190px"), DESK, tmp_path)[1].startswith("film ")
    stiff = text.replace("</head>", "<style>pre { white-space: pre !important; }</style></head>")
    assert "def find_prefix" in overflow(stiff, TELEPHONE, tmp_path)[1]


def test_the_speaker_sees_a_whole_script_beside_the_slides(tmp_path: Path) -> None:
    lecture = read_lecture(lecture_path(4))
    longest = max(lecture.slides, key=lambda slide: sum(len(piece.text) for piece in slide.script))
    number = lecture.slides.index(longest)
    said = shown(render(lecture), SPEAK.replace("SLIDE", str(number)), tmp_path, 1400)
    found = re.search(r"speaker over (-?\d+) beside (\w+) above (\w+) notes \[(.*)\]", said, re.DOTALL)
    assert found is not None, said[-500:]
    assert found[1] == "0" and found[2] == found[3] == "true"
    assert longest.script[0].text.split()[0] in found[4]
