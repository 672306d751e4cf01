// Tables whose columns sort: by a click or a key on a header's button, and said aloud by aria-sort.

/** A number where a text is one, else the text. */
function sortKey(cell) {
  const text = cell.dataset.sort ?? cell.textContent.trim();
  const number = parseFloat(text);
  return Number.isNaN(number) ? text : number;
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1; // figures before words
  if (typeof b === "number") return 1;
  return a.localeCompare(b, "en", { numeric: true });
}

/** Sort by a column; words stand behind figures whichever way. */
function sortBy(table, at) {
  const header = table.tHead.rows[0].cells[at];
  const falls = header.getAttribute("aria-sort") === "ascending";
  for (const it of table.tHead.rows[0].cells) it.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", falls ? "descending" : "ascending");
  const keyed = [...table.tBodies[0].rows].map((row) => [sortKey(row.cells[at]), row]);
  const sign = falls ? -1 : 1;
  keyed.sort(([a], [b]) => (typeof a === typeof b ? sign * compareKeys(a, b) : compareKeys(a, b)));
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

/** Headers become buttons. */
function makeSortable(table) {
  [...table.tHead.rows[0].cells].forEach((header, at) => {
    const inside = [...header.childNodes];
    const button = el("button", { type: "button", class: "sort", onclick: () => sortBy(table, at) }, ...inside);
    header.replaceChildren(button);
  });
  return table;
}

/** A table of `columns` (title, optional class) and rows of nodes, texts, or [node, what it is sorted by]. */
function makeTable(caption, columns, rows) {
  const heads = columns.map(({ title, kind }) => el("th", { scope: "col", class: kind ?? null }, title));
  const made = (cell, at) => {
    const [inside, key] = Array.isArray(cell) ? cell : [cell, null];
    const scope = at ? null : "row";
    return el(at ? "td" : "th", { scope, class: columns[at].kind ?? null, "data-sort": key }, inside);
  };
  const lines = rows.map((cells) => el("tr", {}, ...cells.map(made)));
  const [title, head] = [el("caption", { class: "away" }, caption), el("thead", {}, el("tr", {}, ...heads))];
  return makeSortable(el("table", {}, title, head, el("tbody", {}, ...lines)));
}

/** A figure that opens its panel. */
const opens = (text, label, onclick) =>
  el("button", { type: "button", class: "figure", "aria-label": label, onclick }, text);

for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
