// The timeline of one run, its memory over time, and its stages on the cluster.

const state = { run: null, timeline: null, memory: null, range: null };

const LEFT_PX = () => (isNarrow() ? 46 : 132);
const ROW_PX = (rows) => (rows <= 12 ? 50 : rows <= 24 ? 38 : 30);

const familyOf = (run, index) => run.spans.families[run.spans.kind[index]];

/** One span as a box, with its name in it where that fits; the compute lane is tall, the others are slim. */
function drawSpan(run, c) {
  return (params, api) => {
    const [worker, lane, start, stop, index] = [0, 1, 2, 3, 4].map((dimension) => api.value(dimension));
    const [left, middle] = api.coord([start, worker]);
    const right = api.coord([stop, worker])[0];
    if (
      right - left < 1 &&
      isHidden(params.context, Math.round(left), [worker, lane, index < 0 ? -1 : familyOf(run, index)])
    )
      return null;
    const area = params.coordSys;
    const x = Math.max(left, area.x);
    const width = Math.max(Math.min(right, area.x + area.width) - x, 0.6);
    const box = {
      ...laneBox(lane, middle, api.size([0, 1])[1]),
      x,
      width: width > 3 ? width - 0.7 : width,
      r: width > 6 ? 2 : 0,
    };
    const rect = {
      type: "rect",
      shape: box,
      style: { fill: index < 0 ? c.idle : DATA.span_families[familyOf(run, index)][1] },
    };
    const text = index < 0 || lane !== 0 || width < 20 || box.height < 12 ? "" : shortText(run, index);
    if (!text || width < 7 * text.length + 6) return rect;
    const look = {
      text,
      x: x + width / 2,
      y: box.y + box.height / 2,
      fill: "#fff",
      fontSize: 11,
      fontWeight: 600,
      align: "center",
      verticalAlign: "middle",
    };
    return { type: "group", children: [rect, { type: "text", silent: true, style: look }] };
  };
}

/** Whether a span thinner than a pixel lies on a pixel where one like it was drawn already; gaps that thin always do. */
function isHidden(context, pixel, [worker, lane, family]) {
  const drawn = (context.drawn ??= {});
  const key = (worker * 8 + lane) * 8 + family;
  const hidden = family < 0 || drawn[key] === pixel;
  drawn[key] = pixel;
  return hidden;
}

/** Top and height of a lane in the row around `middle`. */
function laneBox(lane, middle, row) {
  const slim = row * 0.1;
  return lane === 0
    ? { y: middle - row * 0.44, height: row * 0.48 }
    : { y: middle + row * 0.08 + (lane - 1) * (slim + 1), height: slim };
}

/** `F3`: the kind and the microbatch, or the batch where it has only one microbatch. */
function shortText(run, index) {
  const kind = run.spans.kinds[run.spans.kind[index]];
  const microbatch = run.spans.text[index].match(/\.(\d+)/);
  return kind + (run.several && microbatch ? microbatch[1] : run.spans.batch[index]);
}

function describeSpan(run, item) {
  const [worker, , start, stop, index] = item;
  const where = `worker ${worker}, ${run.rows[worker]}`;
  const when = `${timeText(stop - start)}, from ${timeText(start)}`;
  if (index < 0) return tip("idle", when, where);
  const kind = run.spans.kinds[run.spans.kind[index]];
  return tip(`${run.spans.text[index]} · ${DATA.words[kind] || kind}`, `batch ${run.spans.batch[index]}`, when, where);
}

function timelineOptions(run, c) {
  const [from, to] = state.range;
  // Drawn in one go: spans that are drawn bit by bit cannot be hovered.
  const spans = (data, z) => ({
    type: "custom",
    renderItem: drawSpan(run, c),
    data,
    encode: { x: [2, 3], y: 0 },
    z,
    clip: true,
    progressive: 0,
  });
  return {
    grid: { left: LEFT_PX(), right: 14, top: 26, bottom: 62 },
    tooltip: { trigger: "item", formatter: (item) => describeSpan(run, item.value) },
    xAxis: axisLook(c, {
      type: "value",
      position: "top",
      min: 0,
      max: run.end,
      axisLine: { show: false },
      splitNumber: isNarrow() ? 3 : 8,
      splitLine: { lineStyle: { color: c.line } },
      axisLabel: {
        color: c.soft,
        fontSize: 12,
        hideOverlap: true,
        showMinLabel: false,
        showMaxLabel: false,
        formatter: (value) => timeText(value, (state.range[1] - state.range[0]) / 8),
      },
    }),
    yAxis: axisLook(c, {
      type: "category",
      inverse: true,
      data: run.rows,
      splitLine: { show: false },
      axisLine: { show: false },
      axisLabel: {
        interval: 0,
        color: c.ink,
        fontSize: 12,
        lineHeight: 15,
        formatter: (value, row) => rowLabel(run, row),
      },
    }),
    dataZoom: [
      {
        type: "inside",
        filterMode: "weakFilter",
        startValue: from,
        endValue: to,
        zoomOnMouseWheel: "ctrl",
        moveOnMouseMove: true,
        moveOnMouseWheel: false,
        preventDefaultMouseMove: false,
      },
      {
        type: "slider",
        filterMode: "weakFilter",
        startValue: from,
        endValue: to,
        bottom: 14,
        height: 24,
        showDetail: false,
        showDataShadow: false,
        brushSelect: false,
        borderColor: c.line,
        fillerColor: "rgba(110,130,170,.22)",
        handleStyle: { color: c.raised, borderColor: c.soft },
        moveHandleStyle: { color: c.soft, opacity: 0.5 },
        textStyle: { color: c.soft },
      },
    ],
    series: [spans(run.idle, 1), spans(run.items, 2)],
  };
}

function rowLabel(run, row) {
  const busy = run.busy[row] == null ? "" : `${Math.round(run.busy[row] * 100)} % busy`;
  return isNarrow() ? run.devices[row] : busy ? `${run.rows[row]}\n${busy}` : run.rows[row];
}

function setRange(from, to) {
  const wide = Math.max(to - from, 1);
  const start = Math.min(Math.max(from, 0), Math.max(state.run.end - wide, 0));
  state.timeline.chart.dispatchAction({
    type: "dataZoom",
    startValue: start,
    endValue: Math.min(start + wide, state.run.end),
  });
}

function zoomBy(factor) {
  const [from, to] = state.range;
  const middle = (from + to) / 2;
  setRange(middle - ((to - from) * factor) / 2, middle + ((to - from) * factor) / 2);
}

/** The step in the middle, with a little of what is before and after it. */
function stepRange(run) {
  const [from, to] = run.window;
  const edge = (to - from) * 0.02;
  return [Math.max(from - edge, 0), Math.min(to + edge, run.end)];
}

function noteRange() {
  const zoom = state.timeline.chart.getOption().dataZoom[0];
  state.range = [zoom.startValue, zoom.endValue];
  if (state.memory) state.memory.chart.setOption({ xAxis: { min: state.range[0], max: state.range[1] } });
}

function drawTimeline(run) {
  const hasSpans = run.items.length > 0;
  byId("timeline-chart").hidden = byId("span-legend").hidden = !hasSpans;
  byId("timeline-hint").textContent = !hasSpans ? "This run recorded no spans." : hintText(run);
  if (!hasSpans) return;
  state.range = stepRange(run);
  const height = 88 + ROW_PX(run.rows.length) * run.rows.length;
  if (!state.timeline) {
    state.timeline = addChart(byId("timeline-chart"), height, (c) => timelineOptions(state.run, c));
    state.timeline.chart.on("datazoom", noteRange);
  } else {
    byId("timeline-chart").style.height = `${height}px`;
    state.timeline.chart.resize();
    state.timeline.draw();
  }
}

function hintText(run) {
  const left = run.num_left_out
    ? ` ${run.num_left_out.toLocaleString("en")} spans of other batches are left out here.`
    : "";
  return `Compute above, communication below. Hover or tap a span for its action; drag to move, pinch or Ctrl + wheel to zoom.${left}${run.notes.map((note) => ` ${note}.`).join("")}`;
}

function drawSpanLegend() {
  const entries = [...DATA.span_families, ["idle", "var(--idle)"]].map(([name, colour]) => {
    const square = make("i");
    square.style.background = colour;
    return make("span", {}, square, name);
  });
  byId("span-legend").replaceChildren(...entries);
}

function memoryCurveOptions(curve, c) {
  const kinds = Object.keys(curve.parts);
  const largest = Math.max(1, ...curve.time.map((_, i) => kinds.reduce((sum, kind) => sum + curve.parts[kind][i], 0)));
  const [from, to] = state.range || [curve.time[0], curve.time[curve.time.length - 1]];
  return {
    grid: {
      left: isNarrow() ? 58 : LEFT_PX(),
      right: 14,
      top: 12 + 22 * Math.ceil(kinds.length / (isNarrow() ? 3 : 8)),
      bottom: 28,
    },
    legend: {
      top: 0,
      left: 0,
      itemWidth: 14,
      itemHeight: 12,
      icon: "roundRect",
      textStyle: { color: c.soft, fontSize: 12 },
    },
    tooltip: { trigger: "axis", axisPointer: { lineStyle: { color: c.soft } }, formatter: (items) => memoryTip(items) },
    xAxis: axisLook(c, {
      type: "value",
      min: from,
      max: to,
      splitLine: { show: false },
      splitNumber: isNarrow() ? 3 : 8,
      axisLabel: {
        color: c.soft,
        fontSize: 12,
        hideOverlap: true,
        showMinLabel: false,
        showMaxLabel: false,
        formatter: (value) => timeText(value, (state.range ? state.range[1] - state.range[0] : to - from) / 8),
      },
    }),
    yAxis: axisLook(c, { type: "value", ...gibAxis(largest, c) }),
    series: kinds.map((kind) => {
      const colour = MEMORY_COLOURS[DATA.memory_kinds.indexOf(kind)];
      return {
        type: "line",
        name: kind,
        stack: "memory",
        step: "end",
        symbol: "none",
        color: colour,
        lineStyle: { width: 0 },
        areaStyle: { color: colour, opacity: 0.92 },
        data: curve.time.map((time, i) => [time, curve.parts[kind][i]]),
      };
    }),
  };
}

function memoryTip(items) {
  const total = items.reduce((sum, item) => sum + item.value[1], 0);
  return tip(
    `${bytesText(total)} at ${timeText(items[0].value[0])}`,
    ...[...items]
      .reverse()
      .filter((item) => item.value[1])
      .map((item) => `${item.seriesName} ${bytesText(item.value[1])}`),
  );
}

function drawMemory() {
  const curves = state.run.memory;
  byId("memory-box").hidden = !curves.length;
  if (!curves.length) return;
  const describe = (c) => memoryCurveOptions(curveShown(), c);
  byId("memory-peak").textContent = `peak ${curveShown().peak}`;
  if (state.memory) state.memory.draw();
  else state.memory = addChart(byId("memory-chart"), 260, describe);
}

const curveShown = () => state.run.memory[byId("memory-device").value] || state.run.memory[0];

/** Colours the devices of the drawing by the stages of the run, two stages side by side. */
function drawStages(run) {
  for (const cluster of document.querySelectorAll(".cluster")) {
    const isOurs = cluster.dataset.cluster === run.cluster;
    cluster.hidden = !isOurs && document.querySelectorAll(".cluster").length > 1;
    for (const device of cluster.querySelectorAll(".device")) paintDevice(device, isOurs ? run.stages : []);
  }
  const told = byId("cluster-run");
  if (told)
    told.textContent = `The stages of ${byId("run").selectedOptions[0].textContent}, the run that the timeline shows.`;
}

function paintDevice(device, stages) {
  const mine = stages
    .map((devices, stage) => (devices.includes(device.dataset.device) ? stage : -1))
    .filter((stage) => stage >= 0);
  const width = Number(device.querySelector(".box").getAttribute("width"));
  const boxes = mine.map((stage, place) => {
    const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const look = {
      x: (width / mine.length) * place,
      width: width / mine.length,
      height: device.querySelector(".box").getAttribute("height"),
      rx: mine.length > 1 ? 2 : 6,
      fill: STAGE_COLOURS[stage % STAGE_COLOURS.length],
    };
    for (const [key, value] of Object.entries(look)) box.setAttribute(key, value);
    return box;
  });
  device.querySelector(".stages").replaceChildren(...boxes);
  device.querySelector(".stage-name").textContent = mine.length ? `stage ${mine.join("+")}` : "";
  device.classList.toggle("used", mine.length > 0);
}

function showRun(number) {
  state.run = readRun(number);
  state.range = null;
  const options = state.run.memory.map((curve, index) => make("option", { value: index }, curve.device));
  byId("memory-device").replaceChildren(...options);
  drawTimeline(state.run);
  drawMemory();
  drawStages(state.run);
}

function startTimeline() {
  drawSpanLegend();
  showRun(0);
  byId("run").addEventListener("change", (event) => showRun(Number(event.target.value)));
  byId("memory-device").addEventListener("change", drawMemory);
  byId("one-step").addEventListener("click", () => setRange(...stepRange(state.run)));
  byId("whole").addEventListener("click", () => setRange(0, state.run.end));
  byId("closer").addEventListener("click", () => zoomBy(0.5));
  byId("wider").addEventListener("click", () => zoomBy(2));
}

startTables();
watchTheme();
watchWidth();
DATA.families.forEach(drawFamily);
if (RUNS.length) startTimeline();
drawErrors();
drawCurves();
window.stagewright = { charts, state, readyMs: performance.now() };
document.documentElement.dataset.ready = Math.round(window.stagewright.readyMs);
