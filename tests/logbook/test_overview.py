"""The log book's page for browsers, opened in Debian's chromium: sorted, filtered, read, without a mouse."""

import base64
import html
import io
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import metrics, needs
from tests.logbook.pages import HOSTILE, write_lines, write_picture, write_run
from tests.support.browser import Browser, chromium
from tools.logbook import markdown, overview

PEAK = 0.98765  # of the accuracy of run `a/ddp`, in one line of many


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Five runs: with a peak, without, hostile and failed, killed, broken."""
    folder = tmp_path_factory.mktemp("runs")
    ddp = write_run(folder / "a" / "ddp", lines=900, recipe={"layer_decay": 0.75})
    lines = metrics(ddp)
    lines[555]["val/accuracy"] = PEAK
    write_lines(ddp / "metrics.jsonl", lines)
    write_picture(ddp / "plots/confusion.png")
    write_picture(ddp / "plots/curves.png")
    measured = {"mfu_pct": 41.25, "test_accuracy": 0.65, "memory_gib": [{"peak": 3.5}], "energy_wh": 9.5}
    facts = {"strategy": "single", "best_accuracy": 0.9} | measured
    write_run(folder / "a" / "single", began_s=1.6e9, recipe={"lr": 0.2}, **facts)
    about = {"hosts": [HOSTILE], "devices": [HOSTILE], "versions": {HOSTILE: HOSTILE}, "git_commit": HOSTILE}
    recipe = {"model": HOSTILE, "note": HOSTILE, HOSTILE: [HOSTILE]}
    facts = dict.fromkeys(("script", "device", "data", "error", "strategy"), HOSTILE) | {"status": "failed"}
    hostile = folder / "b" / HOSTILE.replace("/", "\\")
    write_run(hostile, began_s=1.65e9, about=about, recipe=recipe, **facts)
    write_picture(hostile / "validation" / "v<i>" / "worst.png")
    (write_run(folder / "b" / "killed", began_s=1.5e9) / "result.json").unlink()
    broken = write_run(folder / "c" / "broken")
    for name in ("recipe.json", "metrics.jsonl"):
        (broken / name).write_text('{"step": ')
    (broken / "plots").mkdir()
    (broken / "plots" / "fit.png").write_bytes(b"<svg onload='window.hacked = 3'>")
    return folder


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("page") / "logbook.html"
    file.write_text(overview.page(*overview.find_runs([runs])))
    return file


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Iterator[Browser]:
    needs("chromium")
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def opened(started, page) -> Browser:
    return started.open(page.as_uri())


def column(browser: Browser, label: str) -> list[str]:
    """The texts of a column of the shown rows."""
    shown = browser.run("""(() => {
        const rows = [...document.getElementById("table").rows].filter((row) => !row.hidden);
        return rows.map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
    })()""")
    return [row[shown[0].index(label)] for row in shown[1:]]


def table(browser: Browser, id: str) -> list[list[str]]:
    rows = f"[...document.getElementById('{id}').rows]"
    return browser.run(f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))")


def text_of(browser: Browser, id: str) -> str:
    return browser.run(f"document.getElementById('{id}').textContent")


def select(browser: Browser, *names: str) -> None:
    """Selects these runs alone, by their boxes."""
    click(browser, "#select-none")
    for name in names:
        labels = "[...document.querySelectorAll('#table label')]"
        browser.run(f"{labels}.find((one) => one.textContent.trim() === {json.dumps(name)}).click()")


def click(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).click()")


def set_to(browser: Browser, selector: str, value: str) -> None:
    """Gives a field a value, and sends the events that follow when a user does."""
    browser.run(f"""(() => {{
        const one = document.querySelector({json.dumps(selector)});
        one.value = {json.dumps(value)};
        one.dispatchEvent(new Event("input", {{ bubbles: true }}));
        one.dispatchEvent(new Event("change", {{ bubbles: true }}));
    }})()""")


# --- In the browser


def test_the_page_asks_for_nothing_and_no_text_of_a_run_becomes_a_part_of_it(opened, page):
    click(opened, "#select-shown")
    opened.run("Promise.all([...document.images].map((image) => image.decode()))")
    requests = [
        event["params"]["request"]["url"] for event in opened.events if "requestWillBe" in event["method"]
    ]
    assert {url.partition(",")[0] for url in requests} == {page.as_uri(), "data:image/png;base64"}
    wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    assert not [event for event in opened.events if event["method"] in wrong]
    assert opened.run("typeof window.hacked") == "undefined"
    assert opened.run("[document.scripts.length, document.images.length]") == [2, 2]
    shown = opened.run("document.body.innerText")
    assert shown.count("<script>window.hacked = 1</script>") >= 5
    assert HOSTILE in column(opened, "model")
    rows = {row[0]: row[1:] for row in table(opened, "settings")}
    assert rows["note"].count(HOSTILE) == 1
    assert HOSTILE in rows[HOSTILE]


def test_a_script_or_picture_from_elsewhere_is_refused(opened):
    """The page's policy holds also where the escaping would fail."""
    opened.run("""new Promise((done) => {
        addEventListener("securitypolicyviolation", () => { window.refused = (window.refused ?? 0) + 1; });
        const holder = document.createElement("div");
        holder.innerHTML = "<img src='file:///etc/hostname'><img src=data: onerror='window.hacked = 4'>";
        const script = document.createElement("script");
        script.textContent = "window.hacked = 5";
        document.body.append(holder, script);
        fetch("https://example.org").catch(() => setTimeout(done, 50));
    })""")
    assert opened.run("typeof window.hacked") == "undefined"
    assert opened.run("window.refused") >= 4


def test_runs_are_sorted_by_the_keyboard(opened):
    assert column(opened, "began, UTC")[0] == "2023-11-14 22:13"
    opened.run("document.querySelector('th[data-key=best_accuracy] button').focus()")
    opened.press("Enter")
    assert column(opened, "best accuracy") == ["0.9000", "0.8000", "0.8000", "0.8000", "0.5000"]
    assert opened.run("document.querySelectorAll('th[aria-sort]').length") == 1
    assert opened.run("document.activeElement.parentElement.ariaSort") == "descending"
    assert "sorted by best accuracy, descending" in text_of(opened, "shown")
    opened.press(" ")
    assert column(opened, "best accuracy")[0] == "0.5000"
    assert opened.run("document.activeElement.parentElement.ariaSort") == "ascending"
    last = [column(opened, name)[-1] for name in ("MFU, %", "test accuracy", "memory of a process, GiB")]
    assert last == ["41.2", "0.6500", "3.50"]
    opened.run("document.querySelector('th[data-key=energy_wh] button').focus()")
    for _ in range(2):
        opened.press("Enter")
        assert column(opened, "energy of the GPUs, Wh") == ["9.5", "", "", "", ""], "without a value: last"


def test_runs_are_filtered(opened):
    opened.run("document.getElementById('words').focus()")
    opened.type("a/ SINGLE")
    assert column(opened, "run") == ["a/single"]
    assert text_of(opened, "shown").startswith("1 of 5 runs")
    assert "3 selected, 3 of them hidden by the filters" in text_of(opened, "shown")
    set_to(opened, "#words", "lr=0.2")
    assert column(opened, "run") == ["a/single"]
    set_to(opened, "#words", "lr=0.3")
    assert column(opened, "run") == []
    click(opened, "button[type=reset]")
    opened.run("new Promise((done) => setTimeout(done, 30))")  # the browser clears the fields after the event
    assert len(column(opened, "run")) == 5
    options = opened.run("[...document.getElementById('choice-status')].map((one) => one.textContent)")
    assert options == ["all", "failed", "finished", "killed or still running"]
    set_to(opened, "#choice-status", "killed or still running")
    assert column(opened, "run") == ["b/killed"]
    assert column(opened, "status") == ["killed or still running"]


def test_curves_along_step_epoch_and_time(opened):
    click(opened, "#select-none")
    assert text_of(opened, "chart") == "No curve: select runs in the table."
    select(opened, "a/ddp", "a/single", "c/broken")
    assert text_of(opened, "left-out") == "Not drawn: c/broken (no val/accuracy)."
    ends = {"step": "step 900", "epoch": "epoch 3", "time": "30 min"}
    for name, end in ends.items():
        click(opened, f"input[value={name}]")
        label = {"time": "time, min"}.get(name, name)
        drawn = opened.run("document.querySelectorAll('#chart polyline').length")
        assert (drawn, table(opened, "reading")[0][1]) == (2, f"at {end}")
        assert text_of(opened, "chart-title") == f"val/accuracy by {label}"
    click(opened, "input[value=step]")
    assert table(opened, "reading")[1:] == [
        ["a/ddp", "0.5", "0.00055556", str(PEAK), "0.5"],
        ["a/single", "0.5, ended", "0.083333", "0.5", "0.5"],
    ]
    assert f"highest {PEAK}" in text_of(opened, "chart-text")
    opened.run("document.getElementById('position').focus()")
    opened.press("Home")
    assert [row[1] for row in table(opened, "reading")] == ["at step 1", "0.00055556", "0.083333"]
    assert "a/ddp 0.00055556" in opened.run("document.getElementById('position').ariaValueText")
    set_to(opened, "#measure", "train/loss")
    click(opened, "#logarithmic")
    labels = opened.run("[...document.querySelectorAll('#chart text')].map((one) => one.textContent)")
    assert {"0.01", "0.1", "1"} <= set(labels)
    assert table(opened, "reading")[1][3] == "2"
    click(opened, "#all-points summary")
    opened.run("new Promise((done) => setTimeout(done, 30))")  # the browser says later that it is open
    points = opened.run("document.querySelectorAll('#points tbody tr').length")
    assert points == 900 + 6


def test_recipes_stand_side_by_side(opened):
    select(opened, "a/ddp", "a/single")
    rows = {row[0]: row[1:] for row in table(opened, "settings")}
    assert rows["setting"] == ["a/ddp", "a/single"]
    assert rows["lr"] == ["0.1", "0.2"]
    assert rows["layer_decay"] == ["0.75", "unset"]
    assert "epochs" not in rows
    click(opened, "#differing")
    rows = {row[0]: row[1:] for row in table(opened, "settings")}
    assert rows["epochs"] == ["3", "3"]
    assert rows["version of torch"] == ["2.15.0", "2.15.0"]
    assert "lr" in opened.run("[...document.querySelectorAll('tr.differs th')].map((one) => one.textContent)")


def test_pictures_are_shown_and_described(opened):
    opened.run("Promise.all([...document.images].map((image) => image.decode()))")
    texts = opened.run("[...document.images].map((image) => [image.alt, image.naturalWidth])")
    right = "Confusion matrix of 3 classes: 20 of 27 are right; most often"
    text = f"{right} d\\u202eog taken for {HOSTILE}, 5; cat taken for {HOSTILE}, 2"
    assert [text, overview.PICTURE_PX] in texts
    assert "curves.png" not in text_of(opened, "pictures")


def test_unfinished_and_broken_runs_are_named(opened):
    lines = opened.run("[...document.querySelectorAll('#problems li')].map((one) => one.textContent)")
    found = {line.partition(": ")[0]: line for line in lines}
    assert len(found) == 3
    assert "killed or still running, last seen at step 6; result.json is missing" in found["b/killed"]
    assert "recipe.json, line 1, is no JSON" in found["c/broken"]
    assert "metrics.jsonl has 1 of 1 lines that can't be read" in found["c/broken"]
    assert "plots/fit.png can't be read as a picture" in found["c/broken"]
    assert any(f"failed: {HOSTILE}, last seen at step 6" in line for line in lines)
    assert text_of(opened, "summary").startswith("5 runs, 2 of them not finished.")


def test_the_address_keeps_the_view(opened):
    set_to(opened, "#words", "a/")
    set_to(opened, "#choice-strategy", "ddp")
    click(opened, "input[value=time]")
    set_to(opened, "#measure", "train/loss")
    click(opened, "th[data-key=energy_wh] button")
    click(opened, "#select-none")
    click(opened, "#table tbody tr:not([hidden]) input")
    parts = "[...document.querySelectorAll('#reading, #shown, #measure')]"
    view = f"[...{parts}.map((one) => one.value ?? one.innerText), location.hash]"
    before = opened.run(view)
    assert "1 selected" in before[0]
    assert opened.open(opened.run("location.href")).run(view) == before
    assert len(column(opened, "run")) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_curves_stand_out_in_light_and_dark(scheme, opened):
    """The contrast of WCAG 2.2: 4.5 for text, 3 for curves and the ring of the focus."""
    opened.show_as(scheme, 1300, 900)
    names = ["ground", "raised", "marked", "text", "faint", "accent", "warning", *(f"c{k}" for k in range(8))]
    style = "getComputedStyle(document.documentElement)"
    values = opened.run(f"{json.dumps(names)}.map((name) => {style}.getPropertyValue('--' + name))")
    colors = dict(zip(names, values, strict=True))

    def light(name: str) -> float:
        parts = np.array([int(colors[name].strip()[k : k + 2], 16) / 255 for k in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    assert (light("ground") > 0.5) == (scheme == "light")
    for ground in ("ground", "raised"):
        assert min(contrast(name, ground) for name in ("text", "faint", "accent", "warning")) >= 4.5
        assert min(contrast(f"c{k}", ground) for k in range(8)) >= 3
    assert contrast("text", "marked") >= 4.5


def test_everything_is_reached_and_named_without_a_mouse(opened):
    nodes = opened.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "checkbox", "combobox", "searchbox", "radio", "slider", "table", "image", "region"}
    found = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if "role" in node]
    shown = [(role, name) for role, name in found if role in named]
    assert {role for role, _ in shown} == named
    assert not [role for role, name in shown if not (name or "").strip()]
    opened.run("document.querySelector('nav a').focus()")
    reached = []
    while len(reached) < 80 and "differing" not in reached:
        opened.press("Tab")
        name, ring_px = opened.run("""(() => {
            const one = document.activeElement, style = getComputedStyle(one);
            const ring = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth);
            return [one.id || one.name || one.textContent, ring];
        })()""")
        assert ring_px >= 2, name
        reached.append(name)
    expected = ["words", "choice-status", "select-shown", "run", "energy of the GPUs, Wh", "measure", "along"]
    expected += ["logarithmic", "position"]
    assert [name for name in reached if name in expected] == expected


def test_a_narrow_window_scrolls_tables_and_not_the_page(opened):
    opened.show_as("dark", 380, 800)
    assert opened.run("document.documentElement.scrollWidth") == 380
    assert opened.run("document.querySelector('#chart svg').clientWidth") < 380


@pytest.mark.full
def test_a_hundred_runs_of_2000_points_open_in_a_second(started, tmp_path):
    for k in range(100):
        write_picture(write_run(tmp_path / f"{k}", lines=2000, began_s=1.7e9 + k) / "plots/confusion.png")
    file = tmp_path / "logbook.html"
    file.write_text(overview.page(*overview.find_runs([tmp_path])))
    assert file.stat().st_size < 2e7
    begins = time.monotonic()
    started.open(file.as_uri())
    assert len(column(started, "run")) == 100
    assert time.monotonic() - begins < 1


# --- Without a browser


def test_a_page_without_escaping_is_found(runs, page, monkeypatch):
    """A mutant: the template's values as they are."""
    assert "<script>window" not in page.read_text()
    environment = markdown._environment(False)
    monkeypatch.setattr(environment, "finalize", markdown.Markup)
    monkeypatch.setattr(environment, "cache", None)
    assert "<script>window" in overview.page(*overview.find_runs([runs]))


def test_the_same_runs_give_the_same_bytes(runs, page):
    places = [runs / "b", runs / "a" / "single", runs / "c", runs / "a" / "ddp", runs / "a"]
    assert overview.page(*overview.find_runs(places)) == page.read_text()


def test_a_place_without_runs_is_refused_and_an_unreadable_folder_named(runs, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=f"{tmp_path} has no run: a run's folder has one of recipe.json"):
        overview.find_runs([runs, tmp_path])
    with pytest.raises(ValueError, match="nowhere can't be read: No such file or directory"):
        overview.find_runs([runs, tmp_path / "nowhere"])
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    folders, unread = overview.find_runs([runs])
    assert [folder.name for folder in folders] == ["ddp", "single", "broken"]
    assert [line.endswith("/b can't be read: Permission denied") for line in unread] == [True]
    assert f"<li>a folder: {unread[0]}</li>" in html.unescape(overview.page(folders, unread))


def test_pictures_have_a_limit_and_those_of_older_runs_are_left_out(runs, monkeypatch):
    monkeypatch.setattr(overview, "PICTURES_BYTES", 1)
    text = overview.page(*overview.find_runs([runs]))
    (source,) = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    with Image.open(io.BytesIO(base64.b64decode(source))) as image:
        assert image.size == (overview.PICTURE_PX, 300)
    kept, left_out = text.index(source), text.index("Left out: a page has")
    assert text.index("<h3>a/ddp</h3>") < kept < text.index("<h3>a/single</h3>") < left_out
    assert text.count("Left out: a page has") == 1
