// Choices as plain HTML controls, which every key and every screen reader knows.

class Controls {
  constructor(form, id) {
    Object.assign(this, { form, id, fields: {} });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Radio buttons for a few options, a select for many, hidden where there is one. Kept while the options last. */
  one(name, legend, options, value, choose, text = (it) => `${it}`) {
    const key = JSON.stringify([options, options.map(text)]);
    if (this.fields[name]?.key !== key) {
      const made =
        options.length <= 6
          ? this.radios(name, legend, options, choose, text)
          : this.select(name, legend, options, choose, text);
      made.place.hidden = options.length < 2;
      this.put(name, key, made);
    }
    this.fields[name].set(value);
  }

  radios(name, legend, options, choose, text) {
    const id = `${this.id}-${name}`;
    const inputs = options.map((it, at) => el("input", { type: "radio", name: id, id: `${id}-${at}`, value: `${it}` }));
    const labels = inputs.map((it, at) => el("label", {}, it, el("span", {}, text(options[at]))));
    const place = el("fieldset", { class: "field", "data-field": name }, el("legend", {}, legend), ...labels);
    place.addEventListener("change", () => choose(options[inputs.findIndex((it) => it.checked)]));
    return { place, set: (now) => inputs.forEach((it, at) => (it.checked = options[at] === now)) };
  }

  select(name, legend, options, choose, text) {
    const id = `${this.id}-${name}`;
    const select = el("select", { id }, ...options.map((it, at) => el("option", { value: at }, text(it))));
    select.addEventListener("change", () => choose(options[Number(select.value)]));
    const place = el("div", { class: "field one", "data-field": name }, el("label", { for: id }, legend), select);
    return { place, set: (now) => (select.value = `${options.indexOf(now)}`) };
  }

  /** A checkbox for each option, perhaps with a picture before its name. */
  many(name, legend, options, isOn, changed, picture = () => null) {
    const key = JSON.stringify([options, isDark()]);
    if (this.fields[name]?.key === key) return;
    const boxes = options.map((option) => {
      const input = el("input", { type: "checkbox", value: option });
      input.checked = isOn(option);
      input.addEventListener("change", () => changed(option, input.checked));
      return el("label", {}, input, picture(option), el("span", {}, option));
    });
    const place = el("fieldset", { class: "field wide", "data-field": name }, el("legend", {}, legend), ...boxes);
    this.put(name, key, { place, set: () => {} });
  }

  put(name, key, { place, set }) {
    if (this.fields[name]) this.fields[name].place.replaceWith(place);
    else this.form.append(place);
    this.fields[name] = { key, place, set };
  }
}

const MARKS = {
  circle: "M9 6a5 5 0 1 0 10 0a5 5 0 1 0-10 0",
  square: "M10 2h8v8h-8z",
  diamond: "M14 0l5 6l-5 6l-5-6z",
  "triangle-up": "M14 1l5.500 9h-11z",
  "triangle-down": "M14 11l5.500-9h-11z",
  cross: "M12 1h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
  "triangle-right": "M19.500 6l-9-5.500v11z",
  "triangle-left": "M8.500 6l9-5.500v11z",
};

/** The line and the mark of a contender, as plots draw them. */
function swatch(name) {
  const { colour, shape, dash } = styleOf(name);
  const drawn = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const dashes = dash[1] ? dash.join(" ") : "none";
  const made = drawn("svg", { width: 28, height: 12, viewBox: "0 0 28 12", "aria-hidden": "true", class: "swatch" });
  made.append(drawn("path", { d: "M0 6h28", stroke: colour, "stroke-width": 2.25, "stroke-dasharray": dashes }));
  made.append(drawn("path", { d: MARKS[shape], fill: colour }));
  return made;
}
