// Parts of the page with one plot and one table: parity, targets, models, and the differences of two files.

/** A plot, a table and controls over plain records; `told` says how each is made of them. */
class Part {
  constructor(id, records, told) {
    Object.assign(this, { root: document.getElementById(id), id, records, told, wish: {}, off: {} });
    this.fields = new Controls(this.root.querySelector(".controls"), id);
    this.plot = new Plot(this.root.querySelector(".plot"), told.plot, (at) => this.open(at));
    this.behind = this.root.querySelector("details.behind");
    this.behind.addEventListener("toggle", () => this.table());
    for (const { name } of told.boxes ?? []) this.off[name] = new Set();
    this.draw();
  }

  open(at) {
    const { title, parts } = this.told.panel(this.records[at]);
    openPanel(title, parts);
  }

  settle() {
    let left = this.records;
    for (const { name, legend } of this.told.dims ?? []) {
      const values = distinct(left.map((it) => it[name]));
      const chosen = [this.wish[name], values[0]].find((it) => values.includes(it));
      this.fields.one(name, legend, values, chosen, (it) => ((this.wish[name] = it), this.draw()));
      left = left.filter((it) => it[name] === chosen);
    }
    const all = left; // a box is there also while others leave nothing of it
    for (const { name, legend, picture } of this.told.boxes ?? []) {
      const changed = (value, on) => (this.off[name][on ? "delete" : "add"](value), this.draw());
      const values = distinct(all.map((it) => it[name]));
      this.fields.many(name, legend, values, (it) => !this.off[name].has(it), changed, picture);
      left = left.filter((it) => !this.off[name].has(it[name]));
    }
    return left;
  }

  draw() {
    const left = this.settle();
    const { marks, guide, label } = this.told;
    this.left = left;
    this.plot.show({ rows: marks(left), ...(guide ? { guide: [{ ...guide, ink: css("--ink") }] } : {}) }, label);
    this.root.querySelector(".count").textContent = `${left.length} rows`;
    this.table();
  }

  /** The table behind the plot; made only where it is open, as it may have thousands of rows. */
  table() {
    if (!this.behind.open) return;
    const { columns, caption } = this.told;
    const lines = this.left.map((it) =>
      columns.map(({ of, opens: button }) => {
        const text = of(it);
        const shown = typeof text === "number" ? figure(text) : text;
        return button
          ? [opens(shown, `${shown}: ${this.told.name(it)}`, () => this.open(it.at)), `${text}`]
          : [shown, `${text}`];
      }),
    );
    this.root.querySelector(".table-box").replaceChildren(makeTable(caption, columns, lines));
  }
}

/** A place in its lane that looks drawn by lot and is always the same. */
const jitter = (at) => 2 * ((((Math.sin(at * 12.9898 + 1) * 43758.5453) % 1) + 1) % 1) - 1;

const markOf = (name) => {
  const { colour, shape } = styleOf(name);
  return { colour, shape };
};

// ---------------------------------------------------------------- parity

/** An error or a budget; `inf` and `nan` are texts. */
const shortly = (value) => (typeof value === "number" ? value.toExponential(1) : (value ?? "–"));

const TENSORS = ["out", "lse", "dq", "dk", "dv"];

function parityPart(records) {
  const backends = inOrder(distinct(records.map((it) => it.backend)));
  const height = (it) =>
    (2 * backends.indexOf(it.backend) + 1) / backends.length - 1 + (0.5 * jitter(it.at)) / backends.length;
  return new Part("parity", records, {
    plot: "strip",
    guide: { x: 1, told: "the budget" },
    dims: [{ name: "report", legend: "Run" }],
    boxes: [
      { name: "backend", legend: "Backends", picture: swatch },
      { name: "tensor", legend: "Results" },
    ],
    marks: (rows) =>
      rows.map((it) => ({
        x: it.ratio,
        lane: `${it.direction} ${it.tensor}`,
        yo: TENSORS.indexOf(it.tensor),
        jitter: height(it),
        ...markOf(it.backend),
        pick: it.at,
        what: `${it.backend} ${it.case}`,
        figure: it.beyond || it.ratio.toFixed(2),
      })),
    label: "Plot of each case's error over its budget, by result; 1 is the limit. The table below has its figures.",
    caption: "Error over budget",
    name: (it) => `${it.backend}, ${it.case}, ${it.tensor}`,
    columns: [
      { title: "case", of: (it) => it.case },
      { title: "backend", of: (it) => it.backend },
      { title: "direction", of: (it) => it.direction },
      { title: "result", of: (it) => it.tensor },
      { title: "error", kind: "number", of: (it) => shortly(it.error) },
      { title: "budget", kind: "number", of: (it) => shortly(it.budget) },
      { title: "error / budget", kind: "number", of: (it) => it.beyond || it.ratio, opens: true },
    ],
    panel: (it) => ({
      title: `${it.backend} ${it.direction}, ${it.case}`,
      parts: [
        part(
          "Error",
          facts([
            ["result", it.tensor],
            ["error over budget", it.beyond || it.ratio.toFixed(3)],
            ["error", it.error === null ? "" : `${it.error} (${it.of})`],
            ["budget", it.budget === null ? "" : `${it.budget}`],
            ["fed by", it.fed_by],
            ["variant", it.variant],
            ["config", it.config],
            ["problem", it.problem],
          ]),
        ),
      ],
    }),
  });
}

// ---------------------------------------------------------------- targets

function targetsPart(records) {
  const backends = inOrder(distinct(records.map((it) => it.backend)));
  const short = (it) =>
    it.registers === null
      ? (it.why[0]?.split(":")[0] ?? "none")
      : `${it.registers}${it.spills ? ` +${it.spills}` : ""}`;
  return new Part("targets", records, {
    plot: "heat",
    dims: [
      { name: "made", legend: "Compiled" },
      { name: "direction", legend: "Direction" },
      { name: "mask", legend: "Mask" },
    ],
    marks: (rows) =>
      rows
        .filter((it) => it.registers !== null)
        .map((it) => {
          const fill = shareFill(it.share);
          const told = `${it.registers} registers, ${it.spills} spills in hot loops`;
          return {
            x: it.arch,
            xo: Number(it.arch.replace(/\D/g, "")),
            y: `${it.backend} D ${it.d}`,
            yo: 10000 * backends.indexOf(it.backend) + Number(it.d),
            fill,
            ink: inkOn(fill),
            label: short(it),
            below: percent(it.share),
            pick: it.at,
            cell: `${it.backend} D=${it.d} ${it.arch}`,
            figure: told,
            print: `${percent(it.share)} of an SM's warps`,
          };
        }),
    label: "Heat map of registers and occupancy by backend, head_dim and arch. The table below has its figures.",
    caption: "Registers, spills and occupancy",
    name: (it) => `${it.backend} ${it.direction}, D ${it.d}, ${it.arch}`,
    columns: [
      { title: "backend", of: (it) => it.backend },
      { title: "D", kind: "number", of: (it) => it.d },
      { title: "arch", of: (it) => it.arch },
      { title: "variant", of: (it) => it.variant || "–" },
      { title: "registers", kind: "number", of: short, opens: true },
      { title: "spills", kind: "number", of: (it) => it.spills ?? "–" },
      { title: "occupancy", kind: "number", of: (it) => percent(it.share) },
      {
        title: "shared memory, KiB",
        kind: "number",
        of: (it) => (it.smem === null ? "–" : (it.smem / 1024).toFixed(1)),
      },
      { title: "threads", kind: "number", of: (it) => it.threads ?? "–" },
    ],
    panel: (it) => ({
      title: `${it.backend} ${it.direction}, D ${it.d} ${it.mask}, ${it.arch}`,
      parts: [
        part(
          "Plan",
          facts([
            ["variant", it.variant],
            ["config", it.config],
          ]),
        ),
        part(
          "Kernel",
          facts([
            ["name", it.kernel],
            ["registers", `${it.registers ?? ""}`],
            ["spills in hot loops", `${it.spills ?? ""}`],
            ["occupancy", percent(it.share)],
            ["limited by", it.limiter],
            ["MMA", it.mma],
          ]),
        ),
        it.why.length ? part("Why there is none", el("ul", {}, ...it.why.map((why) => el("li", {}, why)))) : null,
      ],
    }),
  });
}

// ---------------------------------------------------------------- models

function modelsPart(records) {
  return new Part("models", records, {
    plot: "heat",
    dims: [
      { name: "gpu", legend: "GPU" },
      { name: "mode", legend: "Mode" },
    ],
    marks: (rows) =>
      rows
        .filter((it) => it.tokens !== null)
        .map((it) => {
          const fill = ratioFill(it.ratio ?? 1);
          return {
            x: it.implementation,
            xo: it.at,
            y: it.model,
            yo: it.at,
            fill,
            ink: inkOn(fill),
            label: `${figure(it.tokens / 1000)}k`,
            below: it.ratio === null ? "" : ratio(it.ratio),
            pick: it.at,
            cell: `${it.model}, ${it.implementation}`,
            figure: `${figure(it.tokens / 1000)}k tokens a second`,
            print: `${ratio(it.ratio)} times the fastest other`,
          };
        }),
    label: "Heat map of tokens a second by model and attention. The table below has its figures.",
    caption: "Tokens a second",
    name: (it) => `${it.model}, ${it.implementation}`,
    columns: [
      { title: "model", of: (it) => it.model },
      { title: "attention", of: (it) => it.implementation },
      {
        title: "thousand tokens a second",
        kind: "number",
        of: (it) => (it.tokens === null ? "no" : it.tokens / 1000),
        opens: true,
      },
      { title: "over the fastest other", kind: "number", of: (it) => ratio(it.ratio) },
    ],
    panel: (it) => ({
      title: `${it.implementation} in ${it.model}, ${it.mode}`,
      parts: [
        part(
          "Measured",
          facts([
            ["tokens a second", it.tokens === null ? "" : it.tokens.toFixed(0)],
            [
              "a step",
              it.time_ms === null
                ? ""
                : `${figure(it.time_ms, 4)} ms, quartiles ${figure(it.low_ms, 4)} to ${figure(it.high_ms, 4)}`,
            ],
            ["logits' error over bf16 eager's", it.logits_error === null ? "" : it.logits_error.toFixed(3)],
          ]),
        ),
        it.error ? part("Why it has no time", el("pre", { tabindex: "0" }, it.error)) : null,
        part("Where", el("p", { class: "small" }, it.environment)),
      ],
    }),
  });
}

// ---------------------------------------------------------------- differences

function changesPart(records) {
  const name = (it) => `${it.contender}, ${it.cell}`;
  const half = (title, i) => (i === null ? part(title, el("p", {}, "no row")) : part(title, ...rowParts(ROWS[i])));
  return new Part("changes", records, {
    plot: "changes",
    guide: { x: 1, told: "as before" },
    dims: [],
    boxes: [
      { name: "verdict", legend: "Verdict" },
      { name: "contender", legend: "Contenders", picture: swatch },
    ],
    marks: (rows) =>
      rows
        .filter((it) => it.speedup)
        .map((it) => ({
          x: it.speedup,
          lane: it.contender,
          yo: DATA.order.indexOf(it.contender),
          jitter: jitter(it.at),
          ...markOf(it.contender),
          pick: it.at,
          what: it.cell,
          figure: `${it.speedup.toFixed(3)}, ${it.verdict}`,
        })),
    label: "Plot of each cell's speed-up by contender; 1 is as before. The table below has its figures.",
    caption: "Differences",
    name,
    columns: [
      { title: "contender", of: (it) => it.contender },
      { title: "cell", of: (it) => it.cell },
      { title: "timed", of: (it) => it.regime },
      { title: "before", kind: "number", of: (it) => it.before_text },
      { title: "after", kind: "number", of: (it) => it.after_text },
      { title: "speed-up", kind: "number", of: (it) => (it.speedup ? it.speedup.toFixed(3) : "–"), opens: true },
      { title: "spread", kind: "number", of: (it) => percent(it.spread) },
      { title: "verdict", of: (it) => it.verdict },
    ],
    panel: (it) => ({
      title: name(it),
      parts: [
        part(
          "Change",
          facts([
            ["verdict", it.verdict],
            ["speed-up", it.speedup ? it.speedup.toFixed(3) : ""],
            ["spread", percent(it.spread)],
          ]),
        ),
        half("Before", it.before),
        half("After", it.after),
      ],
    }),
  });
}

const PARTS = { parity: parityPart, targets: targetsPart, models: modelsPart, changes: changesPart };

/** The parts that this page has. */
function makeParts() {
  return Object.entries(PARTS)
    .filter(([id]) => DATA[id])
    .map(([id, make]) => make(records(id)));
}
