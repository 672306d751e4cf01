// The panel that says everything of one figure: what ran and why, or every reason why nothing did.

const panel = document.getElementById("panel");
let opener = null;

/** Show a title and parts; focus goes back to where it came from when the panel closes. */
function openPanel(title, parts) {
  opener = document.activeElement;
  document.getElementById("panel-title").textContent = title;
  document.getElementById("panel-body").replaceChildren(...parts.filter(Boolean));
  panel.showModal();
  panel.scrollTop = 0;
}

panel.addEventListener("close", () => opener?.focus());
panel.addEventListener("click", (event) => event.target === panel && panel.close());
document.getElementById("panel-close").addEventListener("click", () => panel.close());

/** Terms and what they are; lines without a value are left out. */
function facts(pairs) {
  const list = el("dl", { class: "facts" });
  for (const [term, value] of pairs) {
    if (value !== null && value !== undefined && value !== "" && value !== "–")
      list.append(el("dt", {}, term), el("dd", {}, value));
  }
  return list.childElementCount ? list : null;
}

const part = (title, ...children) =>
  children.some(Boolean) ? el("section", {}, el("h3", {}, title), ...children.filter(Boolean)) : null;

/** Fields and values of a config; those of a config in it behind its name. */
const fieldsOf = (config, before = "") =>
  Object.entries(config ?? {}).flatMap(([name, it]) =>
    it instanceof Object ? fieldsOf(it, `${before}${name}.`) : [[before + name, `${it}`]],
  );

function planPart(plan) {
  if (!plan) return null;
  const config = fieldsOf(plan.config);
  const more = [["deterministic", plan.deterministic === undefined ? "" : plan.deterministic ? "yes" : "no"]];
  if (plan.workspace_bytes !== undefined) more.push(["workspace", `${plan.workspace_bytes} bytes`]);
  const settings = config.length ? [el("h4", {}, "Config"), facts(config)] : [];
  const isDated = /\d{4}-\d\d-\d\d/.test(plan.why ?? ""); // of when the rule was written: this figure may be newer
  const why = isDated ? "why, with figures of that date" : "why";
  return part("Plan", facts([["variant", plan.variant], [why, plan.why], ...more]), ...settings);
}

function reasonsPart(reasons) {
  if (!reasons) return null;
  const told = reasons.map((it) =>
    el("li", {}, el("strong", {}, it.code), `: got ${it.got}; allowed ${it.allowed}`, it.hint ? ` (${it.hint})` : ""),
  );
  return part("Why it did not run", el("ul", {}, ...told));
}

function timesPart(row) {
  if (!row.timed) return null;
  const bytes = row.peak_extra_bytes;
  const bound = boundOf(row);
  const boundName = inBytes(row) ? "stated bandwidth" : "roofline's bound";
  const copied = row.copy_tb_per_s;
  const busiest = !inBytes(row) && row.bound ? `, set by ${row.bound.busiest}` : "";
  const quartiles = `${figure(row.low_ms, 4)} to ${figure(row.high_ms, 4)} ms, ${spreadText(row)} of the median`;
  const ofBound = bound && `${figure(bound)} ${unitOf(row)}${busiest}; ${percent(rateOf(row) / bound)} of it`;
  const ofCopy = copied && `${figure(copied)} TB/s; ${percent(row.tb_per_s / copied)} of it`;
  return part(
    "Measured",
    facts([
      ["rate", `${figure(rateOf(row))} ${unitOf(row)}${row.host_bound ? " (host-bound)" : ""}`],
      ["median", `${figure(row.time_ms, 4)} ms`],
      ["quartiles", quartiles],
      ["over the best peer", row.ratio === null ? "" : row.ratio.toFixed(3)],
      [boundName, ofBound],
      ["a copy's rate, same turns", ofCopy],
      ["of the stated peak", row.peak_share === null ? "" : percent(row.peak_share)],
      ["error over budget", typeof row.error_ratio === "number" ? row.error_ratio.toFixed(2) : row.error_ratio],
      ["memory beside inputs and outputs", bytes === null ? "" : `${(bytes / 2 ** 20).toFixed(1)} MiB`],
      ["readings", `${row.rounds}`],
    ]),
  );
}

/** Everything of one row. */
function rowParts(row) {
  return [
    timesPart(row),
    planPart(row.plan),
    row.detail ? part("How it is called", el("p", {}, row.detail)) : null,
    reasonsPart(row.reasons),
    row.error ? part("Error", el("pre", { tabindex: "0" }, row.error)) : null,
    part("Again", el("pre", { tabindex: "0" }, row.command ?? ""), el("p", { class: "small" }, row.environment)),
  ];
}

function openRow(i) {
  const row = ROWS[i];
  openPanel(`${row.contender}, ${row.cell.key}`, rowParts(row));
}
