// The page's data: rows as bench/page/data.py packed them, and small helpers that every part uses.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SPECS = JSON.parse(document.getElementById("specs").textContent);
const BEST = "best of ours";

/** The records of a table as bench/page/data.py packed them; what has a list is looked up there. */
function unpack({ columns, lists, rows }) {
  const field = (name, value) => [name, name in lists && value !== null ? lists[name][value] : value];
  return rows.map((values) => Object.fromEntries(columns.map((name, at) => field(name, values[at] ?? null))));
}

const ROWS = unpack(DATA.rows).map((row, i) => ({
  ...row,
  i,
  source: DATA.sources[row.source],
  timed: row.time_ms !== null,
  ours: DATA.ours.includes(row.contender),
}));

/** An element with attributes and children; text is never read as HTML. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((it) => it !== null && it !== undefined));
  return made;
}

/** Contenders in the order that they have everywhere. */
const inOrder = (names) => DATA.order.filter((name) => names.includes(name));

/** Distinct values in order: numbers by size, others as they come. */
function distinct(values) {
  const found = [...new Set(values)];
  return found.every((it) => typeof it === "number") ? found.sort((a, b) => a - b) : found;
}

/** A rate or a time for a reader: three digits, or four where the first is a thousand. */
function figure(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 100) return value.toFixed(0);
  return value.toPrecision(digits);
}

const ratio = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)} %`);
const length = (n) => (n % 1024 === 0 ? `${n / 1024}k` : `${n}`);

/** True if a row's rate is told in TB/s: memory bounds it. */
const inBytes = (row) => row.tb_per_s !== null && row.cell.work !== "prefill chunk";
const rateOf = (row) => (inBytes(row) ? row.tb_per_s : row.tflops);
const unitOf = (row) => (inBytes(row) ? "TB/s" : "TFLOPS");
/** What bounds a rate: the roofline, or in decode the stated bandwidth of the memory. A copy, which writes as much as
 *  it reads, is no bound for who reads: see the panel. */
const boundOf = (row) => (inBytes(row) ? row.bound?.tb_per_s : row.bound?.tflops) ?? null;
const spreadText = (row) => `${((100 * (row.high_ms - row.low_ms)) / row.time_ms).toFixed(1)} %`;
