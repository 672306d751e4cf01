// The table behind an explorer's plots: a line for each cell, a column for each contender that is checked.

/** The rows of each cell that has a time, by contender. */
function rowsByCell(rows) {
  const found = new Map();
  for (const row of rows) {
    if (!found.has(row.cell)) found.set(row.cell, {});
    found.get(row.cell)[row.contender] = row;
  }
  return [...found].filter(([, its]) => Object.values(its).some((row) => row.timed));
}

function drawTable(explorer) {
  const { root, every, members, drawn, off, choice, unit } = explorer;
  const { dims, labels } = explorer.config;
  const cells = rowsByCell(every ? members : drawn);
  const varies = (dim) => dim === choice.along || new Set(cells.map(([cell]) => cell[dim])).size > 1;
  const told = dims.filter(varies);
  cells.sort(([a], [b]) => told.reduce((found, dim) => found || compareKeys(a[dim], b[dim]), 0));
  const timed = distinct(members.filter((row) => row.timed && !off.has(row.contender)).map((row) => row.contender));
  const names = inOrder(timed);
  const isNumber = (dim) => cells.every(([cell]) => typeof cell[dim] === "number");
  const columns = [
    ...told.map((dim) => ({ title: labels[dim], kind: isNumber(dim) ? "number" : null })),
    ...names.map((title) => ({ title, kind: "number" })),
    { title: `${BEST} / best peer`, kind: "number" },
  ];
  const lines = cells.map(([cell, its]) => [
    ...told.map((dim) => [shown(dim, cell[dim]), `${cell[dim]}`]),
    ...names.map((name) => cellOf(its[name], name, cell)),
    bestOf(Object.values(its)),
  ]);
  const caption = `${unit} by ${told.map((dim) => labels[dim]).join(", ")}`;
  root.querySelector(".table-box").replaceChildren(makeTable(caption, columns, lines));
  root.querySelector(".count").textContent = `${lines.length} ${lines.length === 1 ? "cell" : "cells"}, ${unit}`;
}

/** A figure, or why there is none; either opens the panel. */
function cellOf(row, name, cell) {
  if (!row) return "–";
  const rate = row.host_bound ? `${figure(rateOf(row))} (host-bound)` : figure(rateOf(row));
  const text = row.timed ? rate : row.error ? "error" : "refused";
  const label = `${name}, ${cell.key}: ${row.timed ? `${text} ${unitOf(row)}` : text}`;
  return [opens(text, label, () => openRow(row.i)), row.timed ? `${rateOf(row)}` : text];
}

/** The best of all of ours over the best peer, whoever is checked. */
function bestOf(rows) {
  const found = rows.filter((row) => row.ours && row.ratio !== null).map((row) => row.ratio);
  return found.length ? [ratio(Math.max(...found)), `${Math.max(...found)}`] : "–";
}

/** What did not run in this suite, folded, each reason once. */
function drawUnrun({ root, members, config }) {
  const box = root.querySelector(".unrun");
  const lines = members[0].source.notes[config.kind] ?? [];
  box.hidden = !lines.length;
  box.querySelector("summary").textContent = `Not run: ${lines.length} ${lines.length === 1 ? "reason" : "reasons"}`;
  box.querySelector("ul").replaceChildren(...lines.map((line) => el("li", {}, line)));
}
