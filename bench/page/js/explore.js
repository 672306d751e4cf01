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
    Object.assign(this, { root, config, off: new Set(), wish: {}, choice: {} });
    Object.assign(this, { show: "rate", heat: BEST, every: false, zero: config.zero });
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

  /** Choose in every dimension; returns the options of each, which depend on what is chosen before it. */
  settle() {
    const { dims, along, axes, usual } = this.config;
    const options = {};
    this.members = this.narrow(this.rows, ["gpu", "suite", "regime"], options);
    const { suite } = this.choice;
    const able = along.filter((dim) => new Set(this.members.map((row) => valueOf(row, dim))).size > 1);
    this.choice.along = [this.wish.along, usual[suite], along[0], able[0]].find((it) => able.includes(it)) ?? along[0];
    options.along = able.length ? able : [along[0]];
    const others = dims.filter((dim) => dim !== this.choice.along);
    this.drawn = this.narrow(this.members, others, options);
    options[this.choice.along] = [];
    this.axes = axes[suite] ?? axes.default;
    this.mapped = this.narrowMaps(dims.filter((dim) => !this.axes.includes(dim)));
    return options;
  }

  /** What some rows have in a dimension, in order. */
  values(rows, dim) {
    const found = distinct(rows.map((row) => valueOf(row, dim)));
    return this.config.natural.includes(dim) ? found.sort(compareKeys) : found;
  }

  /** The rows that are left when each dimension has one value: the one wished for, or the usual one, or the first. */
  narrow(rows, dims, options) {
    let left = rows;
    for (const dim of dims) {
      options[dim] = this.values(left, dim);
      const wished = [this.wish[dim], this.config.defaults[dim], options[dim][0]];
      this.choice[dim] = wished.find((it) => options[dim].includes(it));
      left = left.filter((row) => valueOf(row, dim) === this.choice[dim]);
    }
    return left;
  }

  /** The rows of the heat maps, whose axes are no choice; a choice that would leave nothing does not count. */
  narrowMaps(dims) {
    let left = this.members;
    for (const dim of dims) {
      const values = left.map((row) => valueOf(row, dim));
      const chosen = [this.choice[dim], this.config.defaults[dim], values[0]].find((it) => values.includes(it));
      left = left.filter((row) => valueOf(row, dim) === chosen);
    }
    return left;
  }

  /** Controls for what there is to choose; each change settles and draws all again. */
  controls(options) {
    const { dims, labels, suites, regimes } = this.config;
    const chooses = (dim) => (value) => {
      this.wish[dim] = value;
      if (dim === "suite") delete this.wish.along; // each suite has its own
      this.draw();
    };
    const texts = { suite: (it) => suites[it] ?? it, regime: (it) => regimes[it] ?? it, along: (it) => labels[it] };
    for (const dim of ["gpu", "suite", "regime", "along", ...dims]) {
      const text = texts[dim] ?? ((it) => shown(dim, it));
      this.fields.one(dim, labels[dim], options[dim], this.choice[dim], chooses(dim), text);
    }
    this.views();
  }

  /** Controls for how rows are shown, whichever they are. */
  views() {
    const sets = (name) => (value) => ((this[name] = value), this.draw());
    this.unit = this.drawn.filter((it) => it.timed).map(unitOf)[0] ?? "TFLOPS";
    const showing = (it) => (it === "rate" ? this.unit : "over the best peer");
    this.fields.one("show", "Show", ["rate", "ratio"], this.show, sets("show"), showing);
    const fromZero = (it) => (it ? "from zero" : "close up");
    this.fields.one("zero", "Axis", [true, false], this.zero, sets("zero"), fromZero);
    const timed = inOrder(distinct(this.members.filter((row) => row.timed).map((row) => row.contender)));
    const ours = timed.filter((name) => DATA.ours.includes(name));
    if (!ours.includes(this.heat)) this.heat = BEST;
    this.fields.one("heat", "Heat maps show", [BEST, ...ours], this.heat, sets("heat"));
    const changed = (name, on) => (this.off[on ? "delete" : "add"](name), this.draw());
    this.fields.many("contenders", "Contenders", timed, (it) => !this.off.has(it), changed, swatch);
  }

  // -------------------------------------------------------------- drawing

  draw() {
    this.controls(this.settle());
    this.places = {};
    this.drawLines();
    drawMaps(this);
    this.table();
  }

  table() {
    drawTable(this);
    drawUnrun(this);
  }

  drawLines() {
    const { along } = this.choice;
    const has = (row) => row.timed && (this.show === "rate" || row.ratio !== null);
    const timed = this.drawn.filter((row) => has(row) && !this.off.has(row.contender));
    timed.sort((a, b) => this.order(along, a) - this.order(along, b));
    this.root.querySelector(".lines-title").textContent = this.title(along);
    const bounds = this.show === "rate" ? this.bounds(along) : [];
    const guide = this.show === "ratio" ? [{ y: 1 }] : [];
    const names = inOrder(distinct(timed.map((row) => row.contender))).join(", ");
    const label = `Plot of ${this.title(along)}: ${names}. The table below has its figures.`;
    const rows = timed.map((row) => this.mark(row, along));
    const paths = along === "mask" ? [] : rows; // nothing lies between two masks
    this.lines.show({ rows, paths, bounds, guide }, label, { zero: this.zero && this.show === "rate" });
  }

  /** The place of a row's value among all of its dimension in this suite: axes go by it. */
  order(dim, row) {
    if (!this.places[dim]) {
      this.places[dim] = new Map(this.values(this.members, dim).map((value, at) => [value, at]));
    }
    return this.places[dim].get(valueOf(row, dim));
  }

  title(along) {
    const what = this.show === "ratio" ? "Rate over the best peer's" : this.unit;
    return `${what} by ${this.config.labels[along].replace("Mask", "mask")}`;
  }

  mark(row, along) {
    const isRate = this.show === "rate";
    const y = isRate ? rateOf(row) : row.ratio;
    return {
      ...{ x: shown(along, valueOf(row, along)), xo: this.order(along, row), y, pick: row.i },
      ...{ contender: row.contender, ...styleOf(row.contender) },
      ...{ low: isRate ? (y * row.time_ms) / row.high_ms : y, high: isRate ? (y * row.time_ms) / row.low_ms : y },
      rate: `${figure(rateOf(row))} ${unitOf(row)}`,
      spread: spreadText(row),
      over: ratio(row.ratio),
    };
  }

  /** A bar for each place along x: what no rate there can pass. */
  bounds(along) {
    const found = new Map();
    for (const row of this.drawn) if (row.timed && boundOf(row) !== null) found.set(this.order(along, row), row);
    const made = [...found].map(([xo, row]) => {
      const whose = inBytes(row) ? "stated bandwidth" : "roofline";
      const why = inBytes(row) ? "" : `, set by ${row.bound.busiest}`;
      const told = `${whose}: ${figure(boundOf(row))} ${unitOf(row)}${why}`;
      return { x: shown(along, valueOf(row, along)), xo, y: boundOf(row), told };
    });
    return made.sort((a, b) => a.xo - b.xo);
  }
}
