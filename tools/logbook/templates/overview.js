"use strict";
// The page's template has escaped all texts of runs. Here they become text nodes and attributes, never HTML.
const find = (id) => document.getElementById(id);
const { columns, runs } = JSON.parse(find("data").textContent);
const collator = new Intl.Collator("en", { numeric: true });
const DASHES = ["", "7 4", "2 3", "10 3 2 3"];
const FIRST_SHOWN = 3; // selected when the address selects none
const table = find("table");
const lists = [...document.querySelectorAll("#filters select")];
const articles = document.querySelectorAll("#pictures article");

[...table.tBodies[0].rows].forEach((row, i) => {
  const settings = Object.entries(runs[i].settings).map((pair) => pair.join("=").toLowerCase());
  const box = row.querySelector("input"), text = row.textContent.toLowerCase();
  Object.assign(runs[i], { row, box, text, settingsList: settings, article: articles[i] });
});
const byName = new Map(runs.map((run) => [run.name, run]));
const state = { sort: "began", descending: true, position: 1000 };
const styles = new Map(); // selected runs in the order of their selection: {name: number of colour and dash}

// --- Elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function number(value) {
  return value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
}

function cells(texts) {
  return texts.map((text) => make("td", { class: "number" }, text));
}

/** Replaces a table's caption, head and body. labels: of its columns; numbers: all but the first are. */
function write(id, caption, labels, rows, numbers = true) {
  const heads = labels.map((label, i) => make("th", { scope: "col", class: numbers && i ? "number" : "" }, label));
  find(id).caption.textContent = caption;
  find(id).tHead.replaceChildren(make("tr", {}, ...heads));
  find(id).tBodies[0].replaceChildren(...rows);
}

// --- Runs

function select(name) {
  const taken = new Set(styles.values());
  let style = 0;
  while (taken.has(style)) style += 1;
  if (byName.has(name) && !styles.has(name)) styles.set(name, style);
}

function selected() {
  return [...styles.keys()].map((name) => byName.get(name));
}

function shownRuns() {
  return [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => runs.find((run) => run.row === row));
}

function isShown(run) {
  const has = (word) => word.includes("=") ? run.settingsList.some((pair) => pair.startsWith(word))
    : run.text.includes(word);
  const isChosen = (list) => !list.selectedIndex || (run.values[list.dataset.key] ?? "") === list.value;
  return find("words").value.toLowerCase().split(/\s+/).every(has) && lists.every(isChosen);
}

function compare(a, b) {
  const [one, other] = [a, b].map((run) => run.values[state.sort] ?? "");
  if (one === "" || other === "") return (one === "") - (other === ""); // missing values come last
  const order = typeof one === "number" ? one - other : collator.compare(one, other);
  return (state.descending ? -order : order) || collator.compare(a.name, b.name);
}

function showRuns() {
  for (const run of runs) run.row.hidden = !isShown(run);
  table.tBodies[0].append(...[...runs].sort(compare).map((run) => run.row));
  for (const heading of table.tHead.rows[0].cells) {
    if (heading.dataset.key !== state.sort) heading.removeAttribute("aria-sort");
    else heading.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
  }
  const hidden = selected().filter((run) => run.row.hidden).length;
  const label = columns.find((column) => column.key === state.sort)?.label;
  find("shown").textContent = `${shownRuns().length} of ${runs.length} runs, sorted by ${label}, `
    + `${state.descending ? "descending" : "ascending"}. ${styles.size} selected`
    + `${hidden ? `, ${hidden} of them hidden by the filters` : ""}.`;
  remember();
}

function showSelected() {
  for (const run of runs) run.box.checked = styles.has(run.name);
  for (const run of runs) run.article.hidden = !styles.has(run.name);
  find("no-pictures").hidden = styles.size > 0;
  showRuns();
  showCurves();
  showRecipes();
}

// --- Curves

let chart = null; // what is drawn: {curves, measure, label, unit, first, last, px, cursor}

function line(name) {
  const style = styles.get(name);
  return { stroke: `var(--c${style % 8})`, "stroke-dasharray": DASHES[(style + (style >> 3)) % 4] };
}

function named(run) {
  const sample = draw("line", { x1: 0, x2: 35, y1: 6, y2: 6, "stroke-width": 3, ...line(run.name) });
  const swatch = draw("svg", { viewBox: "0 0 35 12", class: "swatch", "aria-hidden": "true" }, sample);
  return make("th", { scope: "row" }, swatch, run.name);
}

function showCurves() {
  const measure = find("measure").value, along = find("along").querySelector(":checked").value;
  const missing = selected().filter((run) => !run.curves[measure]).map((run) => `${run.name} (no ${measure})`);
  const chosen = selected().filter((run) => run.curves[measure]);
  const curves = chosen.map((run) => ({ run, curve: run.curves[measure], y: run.curves[measure].value }));
  find("left-out").textContent = missing.length ? `Not drawn: ${missing.join(", ")}.` : "";
  const largest = Math.max(0, ...curves.map(({ curve }) => curve[along].at(-1)));
  const [unit, size] = along !== "time" ? ["", 1]
    : largest < 600 ? ["s", 1] : largest < 10000 ? ["min", 60] : ["h", 3600];
  for (const one of curves) one.x = one.curve[along].map((value) => value / size);
  const first = Math.min(...curves.map(({ x }) => x[0]));
  chart = { curves, measure, label: along + (unit && `, ${unit}`), unit, first, last: largest / size };
  const none = make("p", {}, "No curve: select runs in the table.");
  find("chart").replaceChildren(curves.length ? drawing() : none);
  showReading();
  showPoints();
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step || 0); // no -0
  return found;
}

/** Ticks of a logarithmic axis, as logarithms. */
function powers(low, high) {
  const factors = high - low > 4 ? [1] : [1, 2, 5], found = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    found.push(...factors.map((factor) => power + Math.log10(factor)));
  }
  return found.filter((value) => value >= low - 1e-9 && value <= high + 1e-9);
}

function drawing() {
  const width = Math.max(300, find("chart").clientWidth), height = Math.min(420, Math.max(260, width / 2));
  const left = 64, right = width - 12, top = 10, bottom = height - 42, isLog = find("logarithmic").checked;
  const scaled = (value) => isLog ? (value > 0 ? Math.log10(value) : null) : value;
  const heights = chart.curves.flatMap(({ y }) => y.map(scaled).filter((value) => value !== null));
  let [low, high] = heights.length ? [Math.min(...heights), Math.max(...heights)] : [0, 1];
  const room = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low - room, high + room];
  const px = (x) => left + (x - chart.first) / (chart.last - chart.first || 1) * (right - left);
  const py = (value) => bottom - (value - low) / (high - low) * (bottom - top); // value: scaled
  const names = { role: "img", "aria-labelledby": "chart-title", "aria-describedby": "chart-text" };
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, ...names });
  const add = (...words) => svg.append(draw(...words));
  add("title", { id: "chart-title" }, `${chart.measure} by ${chart.label}`);
  add("desc", { id: "chart-text" }, described());
  for (const x of ticks(chart.first, chart.last, width / 110)) {
    add("line", { class: "grid", x1: px(x), x2: px(x), y1: top, y2: bottom });
    add("text", { x: px(x), y: bottom + 17, "text-anchor": "middle" }, number(x));
  }
  for (const value of isLog ? powers(low, high) : ticks(low, high, height / 60)) {
    add("line", { class: "grid", x1: left, x2: right, y1: py(value), y2: py(value) });
    add("text", { x: left - 7, y: py(value) + 4, "text-anchor": "end" }, number(isLog ? 10 ** value : value));
  }
  add("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, chart.label);
  for (const { run, x, y } of chart.curves) {
    const places = x.map((value, i) => [px(value), scaled(y[i])]).filter(([, value]) => value !== null);
    const points = places.map(([cx, value]) => `${cx.toFixed(1)},${py(value).toFixed(1)}`).join(" ");
    add("polyline", { class: "curve", points, ...line(run.name) });
    if (places.length >= 40) continue;
    for (const [cx, value] of places) add("circle", { cx, cy: py(value), r: 3, fill: line(run.name).stroke });
  }
  chart.cursor = draw("line", { class: "cursor", y1: top, y2: bottom });
  svg.append(chart.cursor);
  chart.px = px;
  const follow = (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * width / box.width - left) / (right - left);
    state.position = Math.round(1000 * Math.min(1, Math.max(0, share)));
    showReading();
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  return svg;
}

function described() {
  const parts = chart.curves.map(({ run, y }) => `${run.name}: from ${number(y[0])} to ${number(y.at(-1))}, `
    + `lowest ${number(Math.min(...y))}, highest ${number(Math.max(...y))}.`);
  return `${parts.join(" ")} The tables below have the values.`;
}

function showReading() {
  const at = chart.first + (chart.last - chart.first) * state.position / 1000, slider = find("position");
  const shown = chart.curves.map(({ run, x, y }) => {
    const index = x.findLastIndex((value) => value <= at * (1 + 1e-9));
    const value = index < 0 ? "not begun" : number(y[index]) + (at > x.at(-1) * (1 + 1e-9) ? ", ended" : "");
    const values = [value, number(Math.min(...y)), number(Math.max(...y)), number(y.at(-1))];
    return { text: `${run.name} ${value}`, row: make("tr", {}, named(run), ...cells(values)) };
  });
  const where = !shown.length ? "" : chart.unit ? `${number(at)} ${chart.unit}` : `${chart.label} ${number(at)}`;
  const caption = shown.length ? `${chart.measure} of the selected runs, at ${where}` : "No curve";
  write("reading", caption, ["run", `at ${where}`, "lowest", "highest", "last"], shown.map(({ row }) => row));
  slider.value = state.position;
  slider.disabled = !shown.length;
  slider.setAttribute("aria-valuetext", `${where}: ${shown.slice(0, 4).map(({ text }) => text).join("; ")}`);
  if (shown.length) fill(chart.cursor, { x1: chart.px(at), x2: chart.px(at) }, []);
}

function showPoints() {
  const shown = find("all-points").open ? chart.curves : [];
  const rows = shown.flatMap(({ run, curve }) => curve.value.map((value, i) => {
    const values = [curve.step[i], curve.epoch[i], curve.time[i], value].map(number);
    return make("tr", {}, make("th", { scope: "row" }, run.name), ...cells(values));
  }));
  write("points", chart.measure, ["run", "step", "epoch", "time, s", chart.measure], rows);
}

// --- Recipes

function showRecipes() {
  const shown = selected(), onlyDiffering = find("differing").checked, rows = [];
  for (const name of new Set(shown.flatMap((run) => Object.keys(run.settings)))) {
    const values = shown.map((run) => run.settings[name] ?? "not known"), differs = new Set(values).size > 1;
    if (onlyDiffering && !differs) continue;
    const kind = { class: differs && !onlyDiffering ? "differs" : "" };
    const fields = values.map((value) => make("td", {}, value));
    rows.push(make("tr", kind, make("th", { scope: "row" }, name), ...fields));
  }
  const equal = shown.length < 2 ? "Select two runs or more." : "Nothing differs.";
  const caption = !shown.length ? "Select runs in the table."
    : !onlyDiffering ? "All settings. Rows that differ are bold and highlighted."
      : rows.length ? "Settings that differ" : equal;
  write("settings", caption, ["setting", ...shown.map((run) => run.name)], rows, false);
}

// --- The address holds the view: a bookmark keeps it

function remember() {
  const words = new URLSearchParams({ sort: (state.descending ? "-" : "") + state.sort });
  if (find("words").value) words.set("filter", find("words").value);
  for (const list of lists) if (list.selectedIndex) words.set(`only_${list.dataset.key}`, list.value);
  for (const name of styles.keys()) words.append("run", name);
  if (!styles.size) words.set("run", "");
  words.set("measure", find("measure").value);
  words.set("along", find("along").querySelector(":checked").value);
  if (find("logarithmic").checked) words.set("logarithmic", "1");
  if (!find("differing").checked) words.set("all_settings", "1");
  history.replaceState(null, "", `#${words}`);
}

function recall() {
  const words = new URLSearchParams(location.hash.slice(1)), sort = words.get("sort") ?? `-${state.sort}`;
  const pick = (list, value) => { // a value that the list has
    const index = [...list.options].findIndex((option) => option.value === value);
    if (index >= 0) list.selectedIndex = index;
  };
  const isKnown = columns.some(({ key }) => key === sort.replace(/^-/, ""));
  state.sort = isKnown ? sort.replace(/^-/, "") : columns[0].key;
  state.descending = isKnown && sort.startsWith("-");
  find("words").value = words.get("filter") ?? "";
  for (const list of lists) pick(list, words.get(`only_${list.dataset.key}`));
  pick(find("measure"), words.get("measure"));
  const radios = [...find("along").querySelectorAll("input")];
  (radios.find(({ value }) => value === words.get("along")) ?? radios[0]).checked = true;
  find("logarithmic").checked = words.has("logarithmic");
  find("differing").checked = !words.has("all_settings");
  words.getAll("run").forEach(select);
  if (!words.has("run")) [...runs].sort(compare).filter(isShown).slice(0, FIRST_SHOWN).forEach(({ name }) => select(name));
}

// --- Start

function listen() {
  const on = (id, event, change) => find(id).addEventListener(event, change);
  table.tHead.addEventListener("click", ({ target }) => {
    const key = target.closest("th").dataset.key, column = columns.find((one) => one.key === key);
    state.descending = state.sort === key ? !state.descending : column.digits !== null;
    state.sort = key;
    showRuns();
  });
  for (const { name, box } of runs) {
    box.addEventListener("change", () => {
      box.checked ? select(name) : styles.delete(name);
      showSelected();
    });
  }
  on("filters", "input", showRuns);
  on("filters", "submit", (event) => event.preventDefault());
  on("filters", "reset", () => setTimeout(showRuns)); // the browser clears the fields after this event
  on("select-shown", "click", () => {
    shownRuns().forEach(({ name }) => select(name));
    showSelected();
  });
  on("select-none", "click", () => {
    styles.clear();
    showSelected();
  });
  on("axes", "change", () => { remember(); showCurves(); });
  on("differing", "change", () => { remember(); showRecipes(); });
  on("position", "input", () => { state.position = Number(find("position").value); showReading(); });
  on("all-points", "toggle", showPoints);
  let width = innerWidth;
  addEventListener("hashchange", () => location.hash.includes("sort=") ? location.reload() : remember());
  addEventListener("resize", () => {
    if (width !== innerWidth) showCurves();
    width = innerWidth;
  });
}

recall();
const jump = find(location.hash.slice(1)); // a link to a part of the page
listen();
showSelected();
jump?.scrollIntoView();
