// A part of the page with controls: lines over a length, heat maps, and the table behind them.

/** The value of a row along a dimension that controls choose by. */
function valueOf(row, dim) {
  if (dim === "gpu") return row.source.gpu;
  if (dim === "suite") return row.source.suite;
  return dim === "regime" ? row.regime : row.cell[dim];
}

const shown = (dim, value) => (dim === "n" ? length(value) : `${value}`);

class Explorer {
  constructor(root, config) {
    Object.assign(this, { root, config, off: new Set(), wish: {}, choice: {}, show: "rate", heat: BEST, every: false, zero: config.zero });
    this.rows = ROWS.filter((row) => row.cell.kind === config.kind && row.source.timed);
    for (const row of this.rows) if (row.ours && row.contender.includes("/")) this.off.add(row.contender);
    this.fields = new Controls(root.querySelector(".controls"), config.id);
    const pick = (i) => openRow(i);
    this.lines = new Plot(root.querySelector(".lines"), "lines", pick);
    this.ratios = new Plot(root.querySelector(".ratios"), "heat", pick);
    this.shares = new Plot(root.querySelector(".shares"), "heat", pick);
    this.draw();
  }

  // -------------------------------------------------------------- choices

  /** Rows of the dimensions chosen before `dim`, and the choice in it. */
  settle() {
    const { dims, along, axes, defaults } = this.config;
    let left = this.rows;
    const choose = (dim) => {
      const values = distinct(left.map((row) => valueOf(row, dim)));
      if (this.config.natural.includes(dim)) values.sort(compareKeys);
      const wished = [this.wish[dim], defaults[dim], values[0]];
      this.choice[dim] = wished.find((it) => values.includes(it));
      return values;
    };
    const options = {};
    for (const dim of ["gpu", "suite", "regime"]) {
      options[dim] = choose(dim);
      left = left.filter((row) => valueOf(row, dim) === this.choice[dim]);
    }
    this.members = left;
    const suite = this.choice.suite;
    const able = along.filter((dim) => new Set(left.map((row) => valueOf(row, dim))).size > 1);
    const usual = this.config.usual[suite] ?? along[0];
    this.choice.along = [this.wish.along, usual, able[0], along[0]].find((it) => able.includes(it)) ?? along[0];
    options.along = able.length ? able : [along[0]];
    this.axes = axes[suite] ?? axes.default;
    this.drawn = left;
    this.mapped = left;
    for (const dim of dims) {
      left = this.drawn.length ? this.drawn : this.members;
      options[dim] = dim === this.choice.along ? [] : choose(dim);
      if (dim !== this.choice.along) this.drawn = this.drawn.filter((row) => valueOf(row, dim) === this.choice[dim]);
      const fixed = this.choice[dim] ?? defaults[dim];
      if (this.axes.includes(dim)) continue;
      const kept = this.mapped.filter((row) => valueOf(row, dim) === fixed);
      this.mapped = kept.length ? kept : this.mapped.filter((row) => valueOf(row, dim) === valueOf(this.mapped[0], dim));
    }
    return options;
  }

  /** Controls for what there is to choose; each change settles and draws all again. */
  controls(options) {
    const { dims, labels, suites } = this.config;
    const chooses = (dim) => (value) => {
      this.wish[dim] = value;
      if (dim === "suite") delete this.wish.along; // each suite has its own
      this.draw();
    };
    const texts = { suite: (it) => suites[it] ?? it, regime: (it) => this.config.regimes[it] ?? it, along: (it) => labels[it] };
    for (const dim of ["gpu", "suite", "regime", "along", ...dims]) {
      const text = texts[dim] ?? ((it) => shown(dim, it));
      this.fields.one(dim, labels[dim], options[dim], this.choice[dim], chooses(dim), text);
    }
    const rated = { rate: distinct(this.drawn.filter((it) => it.timed).map(unitOf))[0] ?? "TFLOPS", ratio: "over the best peer" };
    this.fields.one("show", "Show", ["rate", "ratio"], this.show, (it) => ((this.show = it), this.draw()), (it) => rated[it]);
    this.unit = rated.rate;
    this.fields.one("zero", "Axis", [true, false], this.zero, (it) => ((this.zero = it), this.draw()), (it) => (it ? "from zero" : "close up"));
    const timed = inOrder(distinct(this.members.filter((row) => row.timed).map((row) => row.contender)));
    const ours = timed.filter((name) => DATA.ours.includes(name));
    if (!ours.includes(this.heat)) this.heat = BEST;
    this.fields.one("heat", "Heat maps show", [BEST, ...ours], this.heat, (it) => ((this.heat = it), this.draw()));
    const changed = (name, on) => {
      this.off[on ? "delete" : "add"](name);
      this.draw();
    };
    this.fields.many("contenders", "Contenders", timed, (it) => !this.off.has(it), changed, swatch);
  }

  // -------------------------------------------------------------- drawing

  draw() {
    this.controls(this.settle());
    const { along } = this.choice;
    const timed = this.drawn.filter((row) => row.timed && !this.off.has(row.contender));
    timed.sort((a, b) => compareKeys(valueOf(a, along), valueOf(b, along)));
    this.root.querySelector(".lines-title").textContent = this.title(along);
    const bounds = this.show === "rate" ? this.bounds(along) : [];
    const guide = this.show === "ratio" ? [{ y: 1 }] : [];
    const names = inOrder(distinct(timed.map((row) => row.contender))).join(", ");
    const label = `Plot of ${this.title(along)}: ${names}. The table below has its figures.`;
    const rows = timed.map((row) => this.mark(row, along));
    const paths = along === "mask" ? [] : rows;
    this.lines.show({ rows, paths, bounds, guide }, label, { zero: this.zero && this.show === "rate" });
    this.maps();
    this.table();
  }

  /** The place of a value among all of its dimension in this suite: axes go by it. */
  order(dim, value) {
    const values = distinct(this.members.map((row) => valueOf(row, dim)));
    if (this.config.natural.includes(dim)) values.sort(compareKeys);
    return values.indexOf(value);
  }

  title(along) {
    const what = this.show === "ratio" ? "Rate over the best peer's" : this.unit;
    return `${what} by ${this.config.labels[along].replace("Mask", "mask")}`;
  }

  mark(row, along) {
    const { colour, shape, dash } = styleOf(row.contender);
    const isRate = this.show === "rate";
    const y = isRate ? rateOf(row) : row.ratio;
    return {
      x: shown(along, valueOf(row, along)), xo: this.order(along, valueOf(row, along)), y, pick: row.i, contender: row.contender, colour, shape, dash,
      low: isRate ? (y * row.time_ms) / row.high_ms : y, high: isRate ? (y * row.time_ms) / row.low_ms : y,
      rate: `${figure(rateOf(row))} ${unitOf(row)}`, spread: `${(100 * spreadOf(row)).toFixed(1)} %`, over: ratio(row.ratio),
    };
  }

  bounds(along) {
    const found = new Map();
    for (const row of this.drawn) if (row.timed && boundOf(row) !== null) found.set(valueOf(row, along), row);
    const told = (row) => (inBytes(row) ? `a copy: ${figure(boundOf(row))} TB/s` : `roofline: ${figure(boundOf(row))} TFLOPS, set by ${row.bound.busiest}`);
    const made = [...found].map(([value, row]) => ({ x: shown(along, value), xo: this.order(along, value), y: boundOf(row), told: told(row), value }));
    return made.sort((a, b) => compareKeys(a.value, b.value));
  }

  /** The row that a heat map shows in each cell: the chosen contender's, or the fastest of ours. */
  chosen() {
    const found = new Map();
    for (const row of this.mapped) {
      if (!row.timed || !row.ours || (this.heat !== BEST && row.contender !== this.heat)) continue;
      const before = found.get(row.cell);
      if (!before || row.tflops > before.tflops) found.set(row.cell, row);
    }
    return [...found.values()];
  }

  maps() {
    const [x, y] = this.axes;
    const rows = this.chosen();
    const lane = (row) => (y === "mask" ? row.cell.mask : `${this.config.labels[y]} ${shown(y, valueOf(row, y))}`);
    const place = (row) => ({
      x: shown(x, valueOf(row, x)), xo: this.order(x, valueOf(row, x)),
      y: lane(row), yo: this.order(y, valueOf(row, y)), pick: row.i, cell: row.cell.key,
    });
    this.root.querySelector(".plots").classList.toggle("tall", new Set(rows.map(lane)).size > 8);
    const ratios = rows.filter((row) => row.ratio !== null).map((row) => {
      const fill = ratioFill(row.ratio);
      const told = `${ratio(row.ratio)} times the best peer`;
      return { ...place(row), fill, ink: inkOn(fill), label: ratio(row.ratio), below: figure(rateOf(row)), figure: told, print: `${row.contender}: ${figure(rateOf(row))} ${unitOf(row)}` };
    });
    const shares = rows.filter((row) => boundOf(row) !== null).map((row) => {
      const share = rateOf(row) / boundOf(row);
      const fill = shareFill(share);
      return { ...place(row), fill, ink: inkOn(fill), label: percent(share), below: `of ${figure(boundOf(row))}`, figure: `${percent(share)} of ${figure(boundOf(row))} ${unitOf(row)}`, print: row.contender };
    });
    const over = `${this.config.labels[x]} and ${this.config.labels[y]}`;
    this.ratios.show({ rows: ratios }, `Heat map by ${over}: ${this.heat} over the best peer. The table below has its figures.`);
    this.shares.show({ rows: shares }, `Heat map by ${over}: share of its bound that ${this.heat} reaches.`);
    this.root.querySelector(".heat-of").textContent = this.heat;
    this.root.querySelector(".shares-figure").hidden = !shares.length;
    this.root.querySelector(".ratios-figure").hidden = !ratios.length;
  }

  // -------------------------------------------------------------- the table

  table() {
    const box = this.root.querySelector(".table-box");
    const rows = (this.every ? this.members : this.drawn).filter((row) => !this.off.has(row.contender));
    const cells = new Map();
    for (const row of rows) {
      if (!cells.has(row.cell)) cells.set(row.cell, {});
      cells.get(row.cell)[row.contender] = row;
    }
    const timedCells = [...cells].filter(([, its]) => Object.values(its).some((row) => row.timed));
    const { dims, labels } = this.config;
    const told = dims.filter((dim) => dim === this.choice.along || new Set(timedCells.map(([cell]) => cell[dim])).size > 1);
    const names = inOrder(distinct(this.members.filter((row) => row.timed && !this.off.has(row.contender)).map((row) => row.contender)));
    timedCells.sort(([a], [b]) => told.reduce((found, dim) => found || compareKeys(a[dim], b[dim]), 0));
    const columns = [
      ...told.map((dim) => ({ title: labels[dim], kind: typeof this.members[0].cell[dim] === "number" ? "number" : null })),
      ...names.map((title) => ({ title, kind: "number" })),
      { title: "ours / best peer", kind: "number" },
    ];
    const lines = timedCells.map(([cell, its]) => [
      ...told.map((dim) => [shown(dim, cell[dim]), `${cell[dim]}`]),
      ...names.map((name) => this.cell(its[name], name, cell)),
      this.best(Object.values(its)),
    ]);
    box.replaceChildren(makeTable(`${this.unit} by ${told.map((dim) => labels[dim]).join(", ")}`, columns, lines));
    this.root.querySelector(".count").textContent = `${lines.length} ${lines.length === 1 ? "cell" : "cells"}, ${this.unit}`;
    this.unrun();
  }

  cell(row, name, cell) {
    if (!row) return "–";
    const text = row.timed ? figure(rateOf(row)) : row.error ? "error" : "refused";
    const told = row.timed ? `${text} ${unitOf(row)}` : text;
    return [opens(text, `${name}, ${cell.key}: ${told}`, () => openRow(row.i)), row.timed ? `${rateOf(row)}` : text];
  }

  best(rows) {
    const found = rows.filter((row) => row.ours && row.ratio !== null).map((row) => row.ratio);
    return found.length ? [ratio(Math.max(...found)), `${Math.max(...found)}`] : "–";
  }

  /** What did not run in this suite, folded, each reason once. */
  unrun() {
    const box = this.root.querySelector(".unrun");
    const source = this.members[0].source;
    const lines = source.notes[this.config.kind] ?? [];
    box.hidden = !lines.length;
    box.querySelector("summary").textContent = `Not run: ${lines.length} reasons`;
    box.querySelector("ul").replaceChildren(...lines.map((line) => el("li", {}, line)));
  }
}
