// Colours of the page in either theme, and the plots that Vega draws with them.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => document.documentElement.dataset.theme === "dark";

function styleOf(contender) {
  const found = DATA.styles[contender] ?? { light: "#555555", dark: "#bbbbbb", shape: "circle", dash: [1, 0] };
  return { ...found, colour: isDark() ? found.dark : found.light };
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const luminance = (rgb) =>
  rgb
    .map((it) => (it / 255 <= 0.04045 ? it / 255 / 12.92 : ((it / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, it, at) => sum + it * [0.2126, 0.7152, 0.0722][at], 0);

function mix(from, to, share) {
  const [a, b] = [channels(from), channels(to)];
  const mixed = a.map((it, at) => Math.round(it + (b[at] - it) * share));
  return `#${mixed.map((it) => it.toString(16).padStart(2, "0")).join("")}`;
}

/** Black or white, whichever stands out more from a fill. */
function inkOn(fill) {
  const light = luminance(channels(fill));
  return (light + 0.05) / 0.05 > 1.05 / (light + 0.05) ? "#000000" : "#ffffff";
}

/** Behind 1 the one colour, ahead of it the other, as strong as the logarithm; 2 times either way is all of it. */
function ratioFill(value) {
  const share = Math.min(1, Math.abs(Math.log2(value)));
  return mix(css("--even"), css(value < 1 ? "--behind" : "--ahead"), share ** 0.7);
}

/** A share of 1 from pale to full. */
const shareFill = (value) => mix(css("--even"), css("--full"), Math.min(1, Math.max(0, value)) ** 1.5);

// ---------------------------------------------------------------- plots

/** Vega's settings, from the page's own colours and type. */
function plotConfig() {
  const [ink, soft, line] = [css("--ink"), css("--soft"), css("--line")];
  return {
    aria: false,
    background: "transparent",
    axis: {
      ...{ labelFont: css("--sans"), labelFontSize: 12, labelPadding: 6, labelLimit: 170 },
      ...{ labelColor: soft, titleColor: soft, domainColor: line, gridColor: line, tickColor: line, gridOpacity: 0.7 },
    },
    axisX: { grid: false },
    style: { cell: { stroke: null }, text: { font: css("--sans"), fill: ink } },
  };
}

const ERRORS = 1; // of what Vega logs
const NOTHING = "Nothing to draw: of what is chosen and checked, nothing has a figure.";

/** Plots that are drawn anew when the theme changes. */
const PLOTS = [];

/** A plot in an element, of a spec by name; `show` gives it rows by the name of its data. */
class Plot {
  constructor(place, spec, onPick) {
    Object.assign(this, { place, spec, onPick, view: null, rows: {}, signals: {}, ready: Promise.resolve() });
    this.nothing = el("p", { class: "note", role: "status", hidden: true }, NOTHING);
    place.after(this.nothing);
    PLOTS.push(this);
    new ResizeObserver(() => this.fit()).observe(place); // Vega looks at the window alone
  }

  show(rows, label, signals = {}) {
    Object.assign(this, { rows, signals, label });
    this.nothing.hidden = rows.rows.length > 0;
    this.place.dataset.drawn = "false";
    this.ready = this.ready.then(() => (this.view ? this.update() : this.embed()));
    return this.ready;
  }

  /** As wide as its place, which changes also when a neighbour comes or goes. */
  fit() {
    const width = this.place.clientWidth;
    if (this.view && width && this.view.signal("width") !== width) this.view.signal("width", width).runAsync();
  }

  async embed() {
    this.view?.finalize();
    const tooltip = { theme: isDark() ? "dark" : "light" };
    const options = { mode: "vega", actions: false, renderer: "svg", config: plotConfig(), tooltip, logLevel: ERRORS };
    const spec = structuredClone(SPECS[this.spec]);
    for (const it of spec.data) if (it.name in this.rows) it.values = this.rows[it.name];
    const made = await vegaEmbed(this.place, spec, options);
    this.view = made.view;
    this.view.addEventListener("click", (_, item) => item?.datum?.pick !== undefined && this.onPick(item.datum.pick));
    await this.update();
  }

  async update() {
    for (const [name, rows] of Object.entries(this.rows)) this.view.data(name, rows);
    for (const [name, value] of Object.entries(this.signals)) this.view.signal(name, value);
    await this.view.resize().runAsync();
    this.place.setAttribute("role", "img"); // Vega has names of its own for these
    this.place.setAttribute("aria-label", this.label);
    this.place.removeAttribute("aria-roledescription");
    this.place.querySelector("svg").setAttribute("aria-hidden", "true");
    this.place.dataset.drawn = "true";
  }
}
