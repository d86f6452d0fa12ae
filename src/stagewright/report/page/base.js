// What the other scripts share: the page's data, its colours, small pieces of DOM, and the list of charts.

const DATA = JSON.parse(document.getElementById("charts-data").textContent);
const RUNS = [...document.querySelectorAll("script.run-data")];
const MARKS = { measured: "●", rehearsed: "◐", simulated: "◇" };
const SERIES_COLOURS = ["#2f7fd0", "#f08a24", "#0f9d7a", "#b3368f", "#8a6d3b", "#6a6fd6", "#c9433a", "#5d7f1e"];
// Neighbours in a stack differ in lightness, so that they are told apart without hue.
const MEMORY_COLOURS = [
  "#33418f",
  "#86bdea",
  "#1c7a5c",
  "#c9b84f",
  "#d9772f",
  "#8e2f68",
  "#a9a9b4",
  "#5b5b66",
  "#d3d3da",
];
const STAGE_COLOURS = ["#2b6cb5", "#b85c12", "#0f7a60", "#98307c", "#76592a", "#5459b8", "#a8362e", "#4d6a18"];
const NARROW_PX = 560;
const charts = [];
const theme = { colours: null };

const byId = (id) => document.getElementById(id);
const isNarrow = () => window.innerWidth < NARROW_PX;

/** An element with text or children; text never becomes HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The theme's colours, light or dark; asking the browser is slow, so the answer is kept until the theme changes. */
function colours() {
  return (theme.colours ??= readColours());
}

function readColours() {
  const probe = document.body.appendChild(make("span"));
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = Object.fromEntries(
    ["paper", "raised", "ink", "soft", "line", "idle", "accent"].map((n) => [n, read(n)]),
  );
  probe.remove();
  return found;
}

/** A chart that is drawn again when the theme or the width changes; `describe(colours)` gives its options. */
function addChart(element, height, describe) {
  const entry = addChartLater(element, () => height, describe);
  entry.open();
  return entry;
}

/** A chart that takes its room at once, and is drawn when it comes near the window or the page is printed. */
function addChartLater(element, height, describe) {
  const entry = { chart: null, element, describe };
  /** Its height is that of what it shows now; where that is nothing, it is not there at all. */
  entry.fit = () => {
    element.style.height = `${height()}px`;
    element.parentElement.classList.toggle("empty", !height());
    entry.chart?.resize();
    if (height()) entry.draw();
  };
  entry.draw = () => entry.chart?.setOption(withLook(describe(colours())), true);
  entry.open = () => {
    NEARBY.unobserve(element);
    entry.chart ??= echarts.init(element, null, { renderer: "canvas" });
    entry.fit();
  };
  entry.fit();
  charts.push(entry);
  NEARBY.observe(element);
  return entry;
}

/** Draws the charts anew after a filter has changed what they show. */
function refitCharts() {
  for (const entry of charts) if (entry.isFiltered) entry.fit();
  for (const box of document.querySelectorAll(".family")) {
    box.hidden = [...box.querySelectorAll(".chart")].every((chart) => chart.parentElement.classList.contains("empty"));
  }
}

const NEARBY = new IntersectionObserver(
  (seen) => {
    const near = new Set(seen.filter((one) => one.isIntersecting).map((one) => one.target));
    charts.filter((entry) => near.has(entry.element) && !entry.chart).forEach((entry) => entry.open());
  },
  { rootMargin: "600px 0px" },
);
window.addEventListener("beforeprint", () => charts.filter((entry) => !entry.chart).forEach((entry) => entry.open()));

/** Options with what all charts have in common. */
function withLook(options) {
  const c = colours();
  return {
    animation: false,
    textStyle: { fontFamily: "system-ui, sans-serif", color: c.ink },
    ...options,
    tooltip: {
      confine: true,
      backgroundColor: c.raised,
      borderColor: c.line,
      textStyle: { color: c.ink, fontSize: 13 },
      ...options.tooltip,
    },
  };
}

/** A tooltip: a bold line, then lines beneath it. */
function tip(title, ...lines) {
  const box = make("div", { class: "tip" }, make("b", {}, title));
  lines.filter(Boolean).forEach((line, index) => box.append(...(index ? [make("br")] : []), make("span", {}, line)));
  return box;
}

function axisLook(c, more = {}) {
  return {
    axisLine: { lineStyle: { color: c.line } },
    axisTick: { show: false },
    axisLabel: { color: c.soft, fontSize: 12, hideOverlap: true },
    splitLine: { lineStyle: { color: c.line } },
    nameTextStyle: { color: c.soft, fontSize: 12 },
    ...more,
  };
}

/** Names beside horizontal bars, broken into lines where they are long. */
function nameAxis(c, names) {
  const width = isNarrow() ? 120 : 270;
  return axisLook(c, {
    type: "category",
    inverse: true,
    data: names,
    splitLine: { show: false },
    axisLabel: { color: c.ink, fontSize: isNarrow() ? 11 : 12, width, overflow: "break", lineHeight: 14, interval: 0 },
  });
}

const nameSpace = () => (isNarrow() ? 128 : 282);

function bytesText(value) {
  for (const [unit, factor] of [
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
  ]) {
    if (value >= factor) return `${(value / factor).toFixed(1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** Microseconds as people read them; `step` is the distance to the next figure beside it, which sets the digits. */
function timeText(micros, step = 0) {
  const [unit, factor] =
    Math.max(Math.abs(micros), step) >= 1e6
      ? ["s", 1e6]
      : Math.max(Math.abs(micros), step) >= 1e3
        ? ["ms", 1e3]
        : ["µs", 1];
  const digits = step ? Math.max(0, Math.ceil(-Math.log10(step / factor))) : 2;
  return `${(micros / factor).toFixed(Math.min(digits, 6))} ${unit}`;
}

function redrawAll() {
  theme.colours = null;
  for (const entry of charts) {
    entry.chart?.resize();
    entry.draw();
  }
}

function watchTheme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", redrawAll);
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    redrawAll();
  });
}

function watchWidth() {
  let width = window.innerWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // A phone's address bar changes only the height.
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redrawAll, 120);
  });
}
