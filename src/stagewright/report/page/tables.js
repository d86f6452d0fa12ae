// Tables that sort when a heading is clicked, are filtered by words, and stand in groups.

const views = new Map(); // By table: its rows as they came, and what they are sorted and grouped by.
const shownCases = { words: [], keys: null };

/** A failed case has a name and a source; its reason stands where the figures would. */
const isFailed = (row) => row.classList.contains("failed");
const cellOf = (row, column) => (isFailed(row) && column > 0 ? null : row.cells[column]);
const isGap = (cell) => !cell || cell.textContent.trim() === "–";

function sorted(rows, column, direction) {
  const key = (row) => cellOf(row, column).dataset.sort;
  const isEmpty = (row) => isGap(cellOf(row, column));
  const isNumeric = rows.every((row) => isEmpty(row) || (key(row) !== "" && !Number.isNaN(Number(key(row)))));
  return [...rows].sort((a, b) => {
    if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b);
    return direction * (isNumeric ? key(a) - key(b) : key(a).localeCompare(key(b), "en", { numeric: true }));
  });
}

const hasWords = (row) => shownCases.words.every((word) => row.textContent.toLowerCase().includes(word));

/** The rows that are not filtered out, sorted, under a heading for each group. */
function arrange(table) {
  const { rows, column, direction, group } = views.get(table);
  const width = [...table.tHead.rows[0].cells].filter((head) => head.offsetParent !== null || !table.offsetParent).length;
  let kept = rows.filter(table.id === "case-table" ? hasWords : (row) => isShown({ source: row.classList[0], ...row.dataset }));
  if (column !== null) kept = sorted(kept, column, direction);
  const groups = new Map();
  for (const row of kept) {
    const name = group === null ? "" : isFailed(row) ? "failed" : row.cells[group].firstChild.textContent.trim() || "–";
    groups.set(name, [...(groups.get(name) || []), row]);
    if (isFailed(row)) row.lastElementChild.colSpan = Math.max(width - 2, 1);
  }
  const heading = (name, number) =>
    make("tr", { class: "group" }, make("th", { colspan: width, scope: "rowgroup" }, `${name} · ${number}`));
  const laid = [...groups].flatMap(([name, own]) => (group === null ? own : [heading(name, own.length), ...own]));
  table.tBodies[0].replaceChildren(...laid);
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  views.set(table, { rows: [...table.tBodies[0].rows], column: null, direction: 1, group: null });
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      // Figures are most often wanted largest first.
      const first = head.classList.contains("right") ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      Object.assign(views.get(table), { column, direction: order === "ascending" ? 1 : -1 });
      arrange(table);
    });
  });
}

/** Whether what is drawn of a case is to be seen: it is, unless the filter leaves its row out. */
const isShown = (item) => !shownCases.keys || shownCases.keys.has(`${item.source} ${item.case}`);

/** Lets only the cases be seen whose rows have all words, in tables and charts. */
function filterCases(text) {
  shownCases.words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const { rows } = views.get(byId("case-table"));
  const kept = rows.filter(hasWords);
  shownCases.keys = kept.length < rows.length ? new Set(kept.map((row) => `${row.classList[0]} ${row.dataset.case}`)) : null;
  [...views.keys()].forEach(arrange);
  byId("filtered").textContent = shownCases.keys ? `${kept.length} of ${rows.length}` : "";
  refitCharts();
}

function startTables() {
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  const table = byId("case-table");
  byId("filter").addEventListener("input", (event) => filterCases(event.target.value));
  byId("group").addEventListener("change", (event) => {
    const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
    views.get(table).group = event.target.value ? heads.indexOf(event.target.value) : null;
    arrange(table);
  });
  byId("columns").addEventListener("click", (event) => {
    const all = table.classList.toggle("all");
    event.target.setAttribute("aria-pressed", all);
    arrange(table);
  });
}
