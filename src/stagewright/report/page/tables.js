// Tables that sort when a heading is clicked; cells without a figure stay at the end.

function sortTable(table, column, direction) {
  const body = table.tBodies[0];
  const key = (row) => row.cells[column].dataset.sort;
  // A failed case has a name and a source; its reason stands where the figures would.
  const isEmpty = (row) =>
    (row.classList.contains("failed") && column > 1) || row.cells[column].textContent.trim() === "–";
  const rows = [...body.rows];
  const isNumeric = rows.every((row) => isEmpty(row) || (key(row) !== "" && !Number.isNaN(Number(key(row)))));
  rows.sort((a, b) => {
    if (isEmpty(a) !== isEmpty(b)) return isEmpty(a) ? 1 : -1;
    return direction * (isNumeric ? key(a) - key(b) : key(a).localeCompare(key(b), "en", { numeric: true }));
  });
  body.append(...rows);
}

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      // Figures are most often wanted largest first.
      const first = head.classList.contains("right") ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      sortTable(table, column, order === "ascending" ? 1 : -1);
    });
  });
}
