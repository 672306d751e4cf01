// Heat maps of an explorer: ours over the best peer, and the share of its bound that it reaches.

/** The row that a heat map shows in each cell: the chosen contender's, or the fastest of ours. */
function chosenRows({ mapped, heat }) {
  const found = new Map();
  for (const row of mapped) {
    if (!row.timed || !row.ours || (heat !== BEST && row.contender !== heat)) continue;
    const before = found.get(row.cell);
    if (!before || row.tflops > before.tflops) found.set(row.cell, row);
  }
  return [...found.values()];
}

/** A cell of a heat map: its fill, its figure, the small print below it, and what both mean in words. */
function heatCell(explorer, row, { fill, label, below, told }) {
  const [x, y] = explorer.axes;
  const name = y === "mask" ? "" : `${explorer.config.labels[y]} `;
  return {
    ...{ x: shown(x, valueOf(row, x)), xo: explorer.order(x, row) },
    ...{ y: `${name}${shown(y, valueOf(row, y))}`, yo: explorer.order(y, row) },
    ...{ fill, ink: inkOn(fill), label, below, pick: row.i },
    ...{ cell: row.cell.key, figure: told, print: `${row.contender}: ${figure(rateOf(row))} ${unitOf(row)}` },
  };
}

function ratioCell(explorer, row) {
  const told = `${ratio(row.ratio)} times the best peer`;
  const [fill, below] = [ratioFill(row.ratio), figure(rateOf(row))];
  return heatCell(explorer, row, { fill, label: ratio(row.ratio), below, told });
}

function shareCell(explorer, row) {
  const share = rateOf(row) / boundOf(row);
  const bound = figure(boundOf(row));
  const told = `${percent(share)} of ${bound} ${unitOf(row)}`;
  return heatCell(explorer, row, { fill: shareFill(share), label: percent(share), below: `of ${bound}`, told });
}

function drawMaps(explorer) {
  const { root, axes, heat, config } = explorer;
  const rows = chosenRows(explorer);
  const ratios = rows.filter((row) => row.ratio !== null).map((row) => ratioCell(explorer, row));
  const shares = rows.filter((row) => boundOf(row) !== null).map((row) => shareCell(explorer, row));
  const over = axes.map((dim) => config.labels[dim]).join(" and ");
  const named = `Heat map by ${over}: ${heat}`;
  explorer.ratios.show({ rows: ratios }, `${named} over the best peer. The table below has its figures.`);
  explorer.shares.show({ rows: shares }, `${named}, the share of its bound that it reaches.`);
  root.querySelector(".heat-of").textContent = heat === BEST ? "Best of ours" : heat;
  root.querySelector(".ratios-figure").hidden = !ratios.length;
  root.querySelector(".shares-figure").hidden = !shares.length;
  root.querySelector(".plots").classList.toggle("tall", new Set(ratios.map((it) => it.y)).size > 8);
}
