// Throughput, speedup, memory by kind, curves, prediction errors.

/** How a bar of each source looks: filled, striped, or an outline. */
function barLook(source, colour) {
  if (source === "measured") return { color: colour, borderRadius: [0, 3, 3, 0] };
  if (source === "rehearsed") {
    return {
      color: colour,
      opacity: 0.85,
      borderRadius: [0, 3, 3, 0],
      decal: {
        symbol: "rect",
        dashArrayX: [1, 0],
        dashArrayY: [2, 4],
        rotation: -Math.PI / 4,
        color: "rgba(255,255,255,.65)",
      },
    };
  }
  return {
    color: "transparent",
    borderColor: colour,
    borderWidth: 1.5,
    borderType: "dashed",
    borderRadius: [0, 3, 3, 0],
  };
}

const marked = (item) => `${MARKS[item.source]}\u00a0${item.name}`;
const lineType = (source) => ({ measured: "solid", rehearsed: "dashed", simulated: "dotted" })[source];
const pointShape = (source) => ({ measured: "circle", rehearsed: "triangle", simulated: "emptyDiamond" })[source];

/** A tick at the limit, and a whisker from the slowest to the fastest repetition. */
function drawMarks(bars, c) {
  return (params, api) => {
    const bar = bars[api.value(0)];
    const half = Math.min(api.size([0, 1])[1] * 0.36, 13);
    const at = (value) => api.coord([value, api.value(0)]);
    const line = (from, to, width, dash) => ({
      type: "line",
      shape: { x1: from[0], y1: from[1], x2: to[0], y2: to[1] },
      style: { stroke: c.ink, lineWidth: width, lineDash: dash },
    });
    const children = [];
    if (bar.limit) {
      const [x, y] = at(bar.limit);
      children.push(line([x, y - half], [x, y + half], 2, null), line(at(bar.value), [x, y], 1, [2, 3]));
    }
    if (bar.high > bar.low) children.push(line(at(bar.low), at(bar.high), 2.5, null));
    return { type: "group", silent: true, children };
  };
}

function throughputOptions(bars, c) {
  const words = bars.map((bar) => bar.limited_by || "");
  const hasWords = !isNarrow() && words.some(Boolean);
  return {
    grid: { left: nameSpace(), right: hasWords ? 190 : 24, top: 6, bottom: 40 },
    tooltip: {
      trigger: "axis",
      axisPointer: { type: "none" },
      formatter: ([item]) => {
        const bar = bars[item.dataIndex];
        return tip(
          marked(bar),
          `${bar.text} ${bar.unit}, ${bar.source}`,
          bar.spread,
          bar.limited_by && `limited by ${bar.limited_by}`,
          bar.limit_text,
        );
      },
    },
    xAxis: axisLook(c, {
      type: "value",
      name: bars[0].unit,
      nameLocation: "middle",
      nameGap: 26,
      splitNumber: isNarrow() ? 3 : 5,
      axisLabel: { color: c.soft, fontSize: 12, showMaxLabel: false },
      max: (range) => Math.max(range.max, ...bars.map((bar) => bar.limit || 0)) * (isNarrow() ? 1.22 : 1.08),
    }),
    yAxis: [
      nameAxis(c, bars.map(marked)),
      {
        ...nameAxis(c, words),
        position: "right",
        show: hasWords,
        axisLine: { show: false },
        axisLabel: { color: c.soft, fontSize: 12, width: 176, overflow: "break", lineHeight: 14, interval: 0 },
      },
    ],
    series: [
      {
        type: "bar",
        barMaxWidth: 20,
        data: bars.map((bar) => ({ value: bar.value, itemStyle: barLook(bar.source, SERIES_COLOURS[0]) })),
        label: {
          show: true,
          position: "insideLeft",
          formatter: (item) => bars[item.dataIndex].text,
          color: c.ink,
          textBorderColor: c.raised,
          textBorderWidth: 3,
          fontSize: 12,
          fontWeight: 600,
        },
      },
      {
        type: "custom",
        renderItem: drawMarks(bars, c),
        data: bars.map((bar, index) => [index]),
        encode: { x: -1, y: 0 },
        silent: true,
        z: 5,
      },
    ],
  };
}

function speedupOptions(lines, c) {
  const ideal = new Map(lines.flatMap((line) => line.points.map((point) => [point.devices, point.ideal])));
  const types = [...new Set(lines.map((line) => line.type))];
  const series = lines.map((line) => {
    const colour = SERIES_COLOURS[types.indexOf(line.type) % SERIES_COLOURS.length];
    return {
      type: "line",
      name: `${MARKS[line.source]} ${line.type}, ${line.source}`,
      symbol: pointShape(line.source),
      symbolSize: 10,
      color: colour,
      lineStyle: { type: lineType(line.source), width: 2 },
      data: line.points.map((point) => ({ value: [point.devices, point.value], point })),
    };
  });
  const straight = {
    type: "line",
    name: "ideal",
    symbol: "none",
    silent: true,
    color: c.soft,
    itemStyle: { opacity: 0 },
    lineStyle: { type: "dashed", width: 1.2 },
    data: [...ideal].sort((a, b) => a[0] - b[0]),
  };
  return {
    grid: { left: 42, right: 20, top: 12 + 22 * Math.ceil((series.length + 1) / (isNarrow() ? 1 : 2)), bottom: 44 },
    legend: { top: 0, left: 0, itemGap: 14, textStyle: { color: c.soft, fontSize: 12 }, itemWidth: 26 },
    tooltip: {
      trigger: "item",
      formatter: (item) => item.data.point && tip(item.data.point.name, item.data.point.text, item.seriesName),
    },
    xAxis: axisLook(c, { type: "value", name: "devices", nameLocation: "middle", nameGap: 28, min: 0, minInterval: 1 }),
    yAxis: axisLook(c, {
      type: "value",
      min: 0,
      name: "",
      axisLabel: { color: c.soft, formatter: (value) => `${value} ×` },
    }),
    series: [straight, ...series],
  };
}

function memoryOptions(bars, c) {
  const kinds = DATA.memory_kinds.filter((kind) => bars.some((bar) => bar.parts[kind]));
  const rows = Math.ceil(kinds.length / (isNarrow() ? 3 : 4));
  return {
    grid: { left: nameSpace(), right: 24, top: 10 + 22 * rows, bottom: 40 },
    legend: { top: 0, left: 0, itemGap: 12, itemWidth: 14, itemHeight: 12, textStyle: { color: c.soft, fontSize: 12 } },
    tooltip: {
      trigger: "axis",
      axisPointer: { type: "none" },
      formatter: (items) => {
        const bar = bars[items[0].dataIndex];
        return tip(
          `${marked(bar)}: ${bar.text}`,
          `${bar.source}, device ${bar.device}`,
          ...kinds.filter((kind) => bar.parts[kind]).map((kind) => `${kind} ${bytesText(bar.parts[kind])}`),
        );
      },
    },
    xAxis: axisLook(c, {
      type: "value",
      ...gibAxis(Math.max(...bars.map((bar) => Object.values(bar.parts).reduce((sum, part) => sum + part, 0))), c),
    }),
    yAxis: nameAxis(c, bars.map(marked)),
    series: kinds.map((kind) => {
      const colour = MEMORY_COLOURS[DATA.memory_kinds.indexOf(kind)];
      return {
        type: "bar",
        name: kind,
        stack: "memory",
        barMaxWidth: 18,
        color: colour,
        data: bars.map((bar) => ({
          value: bar.parts[kind] || 0,
          itemStyle: bar.source === "simulated" ? { opacity: 0.62 } : {},
        })),
      };
    }),
  };
}

/** Ticks of bytes at round figures of the unit that fits the largest. */
function gibAxis(largest, c) {
  const unit = [2 ** 30, 2 ** 20, 2 ** 10, 1].find((factor) => largest >= factor) || 1;
  const rough = largest / unit / (isNarrow() ? 3 : 5);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough) * unit;
  return {
    interval: step,
    min: 0,
    max: Math.ceil((largest * 1.02) / step) * step,
    axisLabel: {
      color: c.soft,
      fontSize: 12,
      formatter: (value) => (value ? bytesText(value).replace(".0 ", " ") : "0"),
    },
  };
}

function curveOptions(chart, lines, c) {
  const twins = twinsOf(chart, lines);
  /** How many lines of its group lie above a line: each is wider than those. */
  const above = (line) => twins.filter((group) => group.includes(line)).reduce((sum, group) => sum + group.length - 1 - group.indexOf(line), 0);
  const batches = new Set(chart.lines.map((line) => line.batch));
  const name = (line) => `${marked(line)}${batches.size > 1 ? `, batch ${line.batch}` : ""}`;
  return {
    grid: {
      left: 46,
      right: 20,
      top: 12 + 22 * (isNarrow() ? lines.length : Math.ceil(lines.length / 2)),
      bottom: 44,
    },
    legend: { top: 0, left: 0, textStyle: { color: c.soft, fontSize: 12 }, itemWidth: 22 },
    tooltip: {
      trigger: "axis",
      formatter: (items) =>
        tip(
          `${chart.unit} ${items[0].value[0].toLocaleString("en", { maximumFractionDigits: 1 })}, epoch ${items[0].value[2].toFixed(2)}`,
          ...items.map((item) => `${item.seriesName}: ${Number(item.value[1].toPrecision(5))}`),
        ),
    },
    xAxis: axisLook(c, { type: "value", name: chart.unit, nameLocation: "middle", nameGap: 28 }),
    yAxis: axisLook(c, { type: "value", scale: true }),
    series: lines.map((line) => ({
      type: "line",
      name: name(line),
      showSymbol: line.points.length < 12,
      symbol: pointShape(line.source),
      sampling: "lttb",
      color: SERIES_COLOURS[line.number % SERIES_COLOURS.length],
      lineStyle: { width: 1.6 + 3 * above(line), type: above(line) ? "solid" : lineType(line.source) },
      data: line.points,
    })),
  };
}

function errorOptions(bars, c) {
  const look = (key, colour) =>
    bars.map((bar) => ({
      value: bar[key],
      itemStyle: { color: colour, borderRadius: 2 },
      label: { position: bar[key] < 0 ? "left" : "right" },
    }));
  const label = {
    show: true,
    fontSize: 11,
    color: c.soft,
    formatter: (item) =>
      item.value == null ? "" : `${item.value > 0 ? "+" : ""}${item.value.toFixed(1)} %`.replace("-", "−"),
  };
  return {
    grid: { left: nameSpace(), right: 54, top: 34, bottom: 40 },
    legend: { top: 0, left: 0, textStyle: { color: c.soft, fontSize: 12 }, itemWidth: 14, itemHeight: 12 },
    tooltip: {
      trigger: "axis",
      axisPointer: { type: "none" },
      formatter: (items) => tip(marked(bars[items[0].dataIndex]), bars[items[0].dataIndex].text),
    },
    xAxis: axisLook(c, {
      type: "value",
      boundaryGap: isNarrow() ? ["40%", "25%"] : ["18%", "12%"],
      name: "error of the prediction",
      nameLocation: "middle",
      nameGap: 26,
      axisLabel: { color: c.soft, formatter: (value) => `${value} %`.replace("-", "−") },
    }),
    yAxis: nameAxis(c, bars.map(marked)),
    series: [
      {
        type: "bar",
        name: "samples/s",
        barMaxWidth: 12,
        color: SERIES_COLOURS[0],
        data: look("rate", SERIES_COLOURS[0]),
        label,
      },
      {
        type: "bar",
        name: "peak memory",
        barMaxWidth: 12,
        color: SERIES_COLOURS[1],
        data: look("memory", SERIES_COLOURS[1]),
        label,
      },
    ],
  };
}

/** A heading and room for a chart of what the filter leaves of `items`; drawn by the function that comes back, once all
 * rooms have their width. */
function place(parent, title, items, height, describe, hint = () => "") {
  const element = make("div", { class: "chart" });
  const note = make("p", { class: "hint" });
  parent.append(make("div", {}, make("h4", {}, title), note, element));
  const shown = () => items.filter((item) => (item.points?.[0].case ? item.points.some((p) => isShown({ ...item, ...p })) : isShown(item)));
  return () => {
    const room = () => (shown().length ? height(shown().length) : 0);
    const entry = addChartLater(element, room, (c) => {
      note.textContent = hint(shown());
      return describe(shown(), c);
    });
    entry.isFiltered = true;
  };
}

function drawFamily(family) {
  const box = make("div", { class: "family" }, make("h3", {}, family.title));
  if (!family.same_batch) box.append(make("p", { class: "hint" }, "The batches differ; each name says its own."));
  byId("families").append(box);
  const limits = "Throughput; the tick is what it would reach if its busiest device never waited";
  const draw = [place(box, limits, family.throughput, (rows) => 56 + 34 * rows, throughputOptions)];
  const pair = box.appendChild(make("div", { class: "pair" }));
  const bars = "Peak memory of the first and the last stage, by kind";
  if (family.memory.length)
    draw.push(place(pair, bars, family.memory, (rows) => 78 + (isNarrow() ? 36 : 30) * rows, memoryOptions));
  if (family.speedup.length) draw.push(place(pair, "Speedup against devices", family.speedup, () => 340, speedupOptions));
  draw.forEach((drawOne) => drawOne());
}

function drawCurves() {
  const box = byId("curve-charts");
  if (!DATA.curves.length) return;
  box.replaceChildren();
  box.className = "pair";
  const draw = DATA.curves.map((chart) => {
    chart.lines.forEach((line, number) => (line.number = number));
    const height = (lines) => 270 + (isNarrow() ? 22 : 16) * lines;
    return place(box, chart.title, chart.lines, height, (lines, c) => curveOptions(chart, lines, c), (lines) => twinText(chart, lines));
  });
  draw.forEach((drawOne) => drawOne());
}

/** The groups of lines in view that lie on one another. */
const twinsOf = (chart, lines) =>
  chart.coincide.map((group) => lines.filter((line) => group.includes(line.number))).filter((group) => group.length > 1);

function twinText(chart, lines) {
  const told = twinsOf(chart, lines).map((group) => group.map(marked).join(", "));
  return told.length ? `On one another, to a hundredth of the range, so drawn as thin lines in thick ones: ${told.join("; ")}.` : "";
}

function drawErrors() {
  if (DATA.errors.length)
    addChartLater(byId("error-chart"), () => 84 + 42 * DATA.errors.length, (c) => errorOptions(DATA.errors, c));
}
