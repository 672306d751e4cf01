// Parts of the page with one plot and one table, over plain records: bench/page/parts.py says which fields go where.

const dash = (it) => (it === null || it === undefined || it === "" ? "–" : it);

/** How a field is written. */
const FORMATS = {
  text: (it) => `${dash(it)}`,
  number: (it) => (typeof it === "number" ? figure(it) : dash(it)),
  opens: (it) => (typeof it === "number" ? figure(it) : dash(it)),
  small: (it) => (typeof it === "number" ? it.toExponential(1) : dash(it)),
  percent,
  ratio,
};

/** A place in its lane that looks drawn by lot and is always the same. */
const jitter = (at) => 2 * ((((Math.sin(at * 12.9898 + 1) * 43758.5453) % 1) + 1) % 1) - 1;

/** A mark of a strip: contenders lie one above the other in each lane. */
function stripMark(it, { names, styled }) {
  const { colour, shape } = styleOf(it[styled]);
  const [count, at] = [names.length, names.indexOf(it[styled])];
  const place = (2 * at + 1) / count - 1 + (0.5 * jitter(it.at)) / count;
  return { x: it.value, jitter: it.lane === it[styled] ? jitter(it.at) : place, colour, shape };
}

/** A cell of a heat map: of targets the share of an SM, of models a ratio. */
function heatMark(it, { fills }) {
  const fill = fills(it.value);
  return { fill, ink: inkOn(fill) };
}

/** A plot, a table and controls over records. */
class Part {
  constructor(id, found, told) {
    const records = found.map((it, at) => ({ at, ...it }));
    Object.assign(this, { root: document.getElementById(id), id, records, told, wish: {}, off: {} });
    this.names = inOrder(distinct(records.map((it) => it[told.styled])));
    this.fills = id === "models" ? ratioFill : shareFill;
    this.fields = new Controls(this.root.querySelector(".controls"), id);
    this.plot = new Plot(this.root.querySelector(".plot"), told.plot, (at) => this.open(at));
    this.behind = this.root.querySelector("details.behind");
    this.behind.addEventListener("toggle", () => this.table());
    for (const name of Object.keys(told.boxes ?? {})) this.off[name] = new Set();
    this.draw();
  }

  name(it) {
    return this.told.name.map((field) => it[field]).join(", ");
  }

  open(at) {
    const it = this.records[at];
    const parts = Object.entries(this.told.panel).map(([title, told]) =>
      typeof told === "string"
        ? part(title, ...this.said(told, it[told]))
        : part(title, facts(told.map(([term, field, format]) => [term, FORMATS[format](it[field])]))),
    );
    openPanel(this.name(it), parts);
  }

  /** A field that is a section of the panel: a row, a list, or a text. */
  said(field, value) {
    if (field === "before" || field === "after") return value === null ? [el("p", {}, "no row")] : rowParts(ROWS[value]);
    if (Array.isArray(value)) return value.length ? [el("ul", {}, ...value.map((it) => el("li", {}, it)))] : [];
    return value ? [el("pre", { tabindex: "0" }, value)] : [];
  }

  settle() {
    let left = this.records;
    for (const [name, legend] of Object.entries(this.told.dims)) {
      const values = distinct(left.map((it) => it[name]));
      const chosen = [this.wish[name], values[0]].find((it) => values.includes(it));
      this.fields.one(name, legend, values, chosen, (it) => ((this.wish[name] = it), this.draw()));
      left = left.filter((it) => it[name] === chosen);
    }
    const all = left; // a box is there also while others leave nothing of it
    for (const [name, legend] of Object.entries(this.told.boxes ?? {})) {
      const changed = (value, on) => (this.off[name][on ? "delete" : "add"](value), this.draw());
      const values = distinct(all.map((it) => it[name]));
      const picture = name === this.told.styled ? swatch : undefined;
      this.fields.many(name, legend, values, (it) => !this.off[name].has(it), changed, picture);
      left = left.filter((it) => !this.off[name].has(it[name]));
    }
    return left;
  }

  draw() {
    this.left = this.settle();
    const { plot, guide, label } = this.told;
    const mark = plot === "heat" ? heatMark : stripMark;
    const drawn = this.left.filter((it) => it.value !== null);
    const rows = drawn.map((it) => ({ ...it, pick: it.at, ...mark(it, { ...this.told, ...this }) }));
    const rule = guide ? { guide: [{ x: 1, told: guide, ink: css("--ink") }] } : {};
    this.plot.show({ rows, ...rule }, `${label} The table below has its figures.`);
    this.root.querySelector(".count").textContent = `${this.left.length} rows`;
    this.table();
  }

  /** The table behind the plot; made only where it is open, as it may have thousands of rows. */
  table() {
    if (!this.behind.open) return;
    const { columns, heading } = this.told;
    const lines = this.left.map((it) =>
      columns.map(([, field, format]) => {
        const shown = FORMATS[format](it[field]);
        const button = () => opens(shown, `${shown}: ${this.name(it)}`, () => this.open(it.at));
        return [format === "opens" ? button() : shown, `${it[field] ?? shown}`];
      }),
    );
    const heads = columns.map(([title, , format]) => ({ title, kind: format === "text" ? null : "number" }));
    this.root.querySelector(".table-box").replaceChildren(makeTable(heading, heads, lines));
  }
}

/** The parts that this page has. */
function makeParts() {
  return Object.entries(DATA.parts)
    .filter(([id]) => DATA[id])
    .map(([id, told]) => new Part(id, unpack(DATA[id]), told));
}
