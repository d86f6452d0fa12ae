// A run under way: asks for its state every second, and shows it.

const LOOK_MS = 1000;
const LOOKS = 60; // Of so many looks the shares of waiting are told.
const live = { data: null, name: null, looks: new Map(), number: 0 };

const runShown = () => live.data.runs.find((run) => run.name === live.name);
const unitOf = (run) => `${run.plan.unit || "samples"}/s`;
const figure = (value) => (value === 0 ? "0" : value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));
const spanText = (seconds) =>
  seconds < 60
    ? `${Math.round(seconds)} s`
    : seconds < 3600
      ? `${Math.floor(seconds / 60)} min ${String(Math.round(seconds % 60)).padStart(2, "0")} s`
      : `${Math.floor(seconds / 3600)} h ${String(Math.round((seconds % 3600) / 60)).padStart(2, "0")} min`;

/** A chart of one figure of the run's steps, or of one for each stage. */
function stepChart(title, curves, format, isFromZero) {
  const element = make("div", { class: "chart" });
  const box = make("div", {}, make("h4", {}, title), element);
  byId("live-charts").append(box);
  const entry = addChartLater(element, () => 250, (c) => {
    const lines = live.data && runShown() ? curves(runShown()) : [];
    return {
      grid: { left: 62, right: 16, top: lines.length > 1 ? 34 : 14, bottom: 42 },
      legend: { show: lines.length > 1, top: 0, left: 0, textStyle: { color: c.soft, fontSize: 12 } },
      tooltip: {
        trigger: "axis",
        formatter: (items) =>
          tip(
            `step ${items[0].value[0].toLocaleString("en")}`,
            ...items.map((item) => `${item.seriesName}: ${format(item.value[1])}`),
          ),
      },
      xAxis: axisLook(c, { type: "value", name: "step", nameLocation: "middle", nameGap: 26, min: "dataMin" }),
      yAxis: axisLook(c, {
        type: "value",
        scale: !isFromZero,
        axisLabel: { color: c.soft, fontSize: 12, formatter: format },
      }),
      series: lines.map((line, index) => ({
        type: "line",
        name: line.name,
        data: line.points.filter((point) => point[1] !== null),
        symbol: line.points.length < 3 ? "circle" : "none",
        color: SERIES_COLOURS[index % SERIES_COLOURS.length],
        lineStyle: { width: 1.8 },
      })),
    };
  });
  return entry;
}

const column = (name, place) => (run) => [{ name: name(run), points: run.points.map((point) => [point[0], point[place]]) }];

function memoryLines(run) {
  const stages = run.points.length ? run.points[run.points.length - 1][3].length : 0;
  const name = (stage) => (stages > 1 ? `stage ${stage}` : "memory");
  return Array.from({ length: stages }, (_, stage) => ({
    name: name(stage),
    points: run.points.map((point) => [point[0], point[3][stage] ?? null]),
  }));
}

/** The figures beside one another: what a person looks for first. */
function showFigures(run, now) {
  const last = run.points[run.points.length - 1];
  const plan = run.plan;
  const rows = [];
  if (last) {
    const [step, loss, rate, memory] = last;
    const left = ((plan.steps - step) * secondsOfStep(run)) - (now - run.time);
    rows.push(["loss", loss === null ? "not a number" : String(Number(loss.toPrecision(4)))]);
    rows.push([unitOf(run), figure(rate)]);
    if (run.state === "running") rows.push(["left", left > 0 ? spanText(left) : "a moment"]);
    rows.push([memory.length > 1 ? "memory by stage" : "memory", memory.map(bytesText).join(" / ")]);
    if (plan.predicted && plan.unit !== "tokens")
      rows.push([`predicted for ${plan.predicted_on}`, `${figure(plan.predicted)} ${unitOf(run)}`]);
  }
  byId("figures").replaceChildren(
    ...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
  const share = last && plan.steps ? last[0] / plan.steps : 0;
  byId("progress").firstElementChild.style.width = `${100 * share}%`;
  byId("progress").setAttribute("aria-valuenow", Math.round(100 * share));
  const epoch = plan.steps_per_epoch ? `epoch ${last ? last[4] + 1 : 1} of ${Math.ceil(plan.steps / plan.steps_per_epoch)}, ` : "";
  const step = last ? last[0].toLocaleString("en") : 0;
  byId("title").textContent = plan.steps
    ? `${plan.model}: ${epoch}step ${step} of ${plan.steps.toLocaleString("en")}`
    : `${run.name} is starting`;
}

/** How long a step takes, of samples by their rate and of text by what the last points say. */
function secondsOfStep(run) {
  const rate = run.points[run.points.length - 1][2];
  return run.plan.unit === "tokens" ? run.step_s || 0 : run.plan.batch / rate;
}

function showPlan(run) {
  const plan = run.plan;
  const stages = (plan.stages || []).map(
    (stage) => `${[...new Set(stage.layers)].join(" … ")} on ${stage.devices}`,
  );
  const facts = plan.model
    ? [
        ...stages,
        `${plan.batch.toLocaleString("en")} ${plan.unit === "tokens" ? "sequences" : plan.unit} a step`,
        ...(stages.length > 1 ? [plan.policy] : []),
        ...(Math.max(...plan.versions) > 1 ? [`versions ${plan.versions.join(", ")}`] : []),
        plan.precision,
      ]
    : [];
  byId("plan").replaceChildren(...facts.map((fact) => make("span", {}, fact)));
}

/** Counts a look for each worker, and shows where it is and for whom it waited how often. */
function showWorkers(run, isNew) {
  const looks = live.looks.get(run.name) || [];
  if (isNew && run.workers.length) looks.push(run.workers.map((worker) => worker.waits));
  live.looks.set(run.name, looks.slice(-LOOKS));
  byId("workers").hidden = !run.workers.length;
  const nameOf = (worker) => run.workers[worker].device;
  const rows = run.workers.map((worker, number) => {
    const waited = looks.filter((look) => look[number]?.length).length;
    const counts = new Map();
    for (const look of looks) for (const peer of look[number] || []) counts.set(peer, (counts.get(peer) || 0) + 1);
    const usual = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 3);
    const peers = usual.map(([peer, times]) => `${nameOf(peer)} ${Math.round((100 * times) / looks.length)} %`);
    const cells = [
      ["left", `${worker.device} · stage ${worker.stages.join("+")}`],
      ["left", worker.at || "starting"],
      ["left", worker.waits.length ? `now ${worker.waits.map(nameOf).join(", ")}` : "nobody", peers.join(", ")],
      ["right", looks.length ? `${Math.round((100 * waited) / looks.length)} %` : "–"],
      ["right", worker.memory ? bytesText(worker.memory) : "–"],
    ];
    return make(
      "tr",
      { class: worker.waits.length ? "waits" : "" },
      ...cells.map(([side, text, note]) => make("td", { class: side }, text, ...(note ? [make("small", {}, note)] : []))),
    );
  });
  byId("worker-rows").replaceChildren(...rows);
}

function showWords(run) {
  const end = run.end ? [`end: ${figure(run.end.samples_per_s * (run.end.tokens || 1))} ${unitOf(run)}; next: ${run.end.next.join(" · ")}`] : [];
  const words = [...run.words.map((word) => `${word.event}: ${word.text}`), ...end];
  byId("words").replaceChildren(...words.reverse().map((word) => make("li", {}, word)));
  byId("said").hidden = !words.length;
}

function showRuns(runs) {
  const newest = [...runs].sort((a, b) => (b.state === "running") - (a.state === "running") || b.time - a.time)[0];
  if (!runs.some((run) => run.name === live.name)) live.name = newest.name;
  const select = byId("run");
  if (document.activeElement !== select) {
    select.replaceChildren(...runs.map((run) => make("option", { value: run.name }, `${run.name} · ${run.state}`)));
    select.value = live.name;
  }
  byId("report").hidden = !runs.some((run) => run.end);
}

function show(isNew) {
  const { runs, now } = live.data;
  if (!runs.length) return;
  showRuns(runs);
  const run = runShown();
  const points = run.points;
  if (points.length > 1) {
    const [first, last] = [points[points.length - 2], points[points.length - 1]];
    run.step_s = (last[5] - first[5]) / Math.max(last[0] - first[0], 1);
  }
  document.title = `${run.state === "running" ? "▶" : "■"} ${run.name} · Stagewright`;
  showFigures(run, now);
  showPlan(run);
  showWorkers(run, isNew);
  showWords(run);
  for (const entry of charts) entry.draw();
  byId("heard").textContent = run.state === "running" ? "live" : run.state;
}

async function look() {
  try {
    const answer = await fetch("live.json", { cache: "no-store" });
    live.data = await answer.json();
    live.number += 1;
    show(true);
  } catch (fault) {
    byId("heard").textContent = "the server does not answer: is `stagewright report --watch` still running?";
  }
  setTimeout(look, LOOK_MS);
}

stepChart("Loss", column(() => "loss", 1), (value) => String(Number(value.toPrecision(4))), false);
stepChart("Rate", column(unitOf, 2), figure, true);
stepChart("Memory by stage, the most that a worker has had", memoryLines, bytesText, true);
watchTheme();
watchWidth();
byId("run").addEventListener("change", (event) => {
  live.name = event.target.value;
  event.target.blur();
  show(false);
});
window.stagewright = { live, charts };
look();
