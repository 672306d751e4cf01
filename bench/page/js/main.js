// The page comes to life: theme first, so that every plot is drawn in it.

const scheme = matchMedia("(prefers-color-scheme: dark)");
const themes = [...document.querySelectorAll('input[name="theme"]')];
const explorers = [];

function applyTheme() {
  const wished = themes.find((it) => it.checked)?.value ?? "system";
  const dark = wished === "dark" || (wished === "system" && scheme.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

/** In another theme every colour is another: plots are made anew, with the rows that they show. */
async function changeTheme() {
  applyTheme();
  for (const plot of PLOTS) {
    plot.view?.finalize();
    plot.view = null;
  }
  for (const it of explorers) it.draw();
  await Promise.all(PLOTS.map((plot) => plot.ready));
}

applyTheme();
for (const it of themes) it.addEventListener("change", changeTheme);
scheme.addEventListener("change", changeTheme);

for (const config of DATA.explorers ?? []) {
  const root = document.getElementById(config.id);
  const explorer = new Explorer(root, config);
  explorers.push(explorer);
  root.querySelector(".every input")?.addEventListener("change", (event) => {
    explorer.every = event.target.checked;
    explorer.table();
  });
}
explorers.push(...makeParts());
Promise.all(PLOTS.map((plot) => plot.ready)).then(() => (document.documentElement.dataset.ready = "true"));
