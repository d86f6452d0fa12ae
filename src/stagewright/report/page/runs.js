// What the page carries of each run, written out when the run is first shown.

/** The run at this place, with its spans as rows of [worker, lane, start, stop, index], parsed once. */
function readRun(number) {
  const block = RUNS[number];
  if (!block.run) {
    const run = JSON.parse(block.textContent);
    run.spans = { ...run.spans, ...writeOutSpans(run.spans) };
    run.memory = run.memory.flatMap(writeOutMemory);
    const { worker, lane, start, length } = run.spans;
    run.items = worker.map((row, i) => [row, lane[i], start[i], start[i] + length[i], i]);
    run.end = run.items.reduce((end, item) => Math.max(end, item[3]), 0);
    run.idle = findIdle(run);
    run.cluster = block.dataset.cluster;
    block.run = run;
  }
  return block.run;
}

/** Columns of all spans: workers that did the same at the same time share theirs in the file, and texts are numbered. */
function writeOutSpans({ groups, texts }) {
  const columns = { worker: [], kind: [], lane: [], batch: [], text: [], start: [], length: [] };
  for (const group of groups)
    for (const worker of group.workers)
      group.start.forEach((start, i) => {
        columns.worker.push(worker);
        columns.text.push(texts[group.text[i]]);
        columns.start.push(start);
        for (const name of ["kind", "lane", "batch", "length"]) columns[name].push(group[name][i]);
      });
  return columns;
}

/** The curves of the devices that share one, with what never changes written out as often as the time. */
function writeOutMemory({ devices, time, parts, peak }) {
  const written = Object.entries(parts).map(([kind, part]) => [kind, Array.isArray(part) ? part : time.map(() => part)]);
  return devices.map((device) => ({ device, time, peak, parts: Object.fromEntries(written) }));
}

/** The gaps between a worker's computations, as rows of the same shape. */
function findIdle(run) {
  const gaps = [];
  run.rows.forEach((_, worker) => {
    const busy = run.items.filter((item) => item[0] === worker && item[1] === 0).sort((a, b) => a[2] - b[2]);
    let free = 0;
    for (const item of busy) {
      if (item[2] > free) gaps.push([worker, 0, free, item[2], -1]);
      free = Math.max(free, item[3]);
    }
    if (run.end > free) gaps.push([worker, 0, free, run.end, -1]);
  });
  return gaps;
}
