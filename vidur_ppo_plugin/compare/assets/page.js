"use strict";
// What the reader can do: choose a theme, schedulers and metrics, sort tables. Charts are drawn when they come into view.

const data = JSON.parse(document.getElementById("data").textContent);
const hiddenSchedulers = new Set();
const shownOf = (scenario) => data.schedulers.filter((scheduler, i) => !hiddenSchedulers.has(i) && data.scenarios[scenario].schedulers[scheduler.label]);

// --- Theme: the system's, until the reader chooses; the choice is kept where the browser allows it ---

const themeButton = document.getElementById("theme");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function storedTheme() {
  try { return localStorage.getItem("vidur-ppo-theme"); } catch { return null; } // refused for local files by some browsers
}

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  const isDark = theme ? theme === "dark" : systemIsDark.matches;
  themeButton.textContent = isDark ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", `Switch to the ${isDark ? "light" : "dark"} theme`);
}

themeButton.addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && systemIsDark.matches);
  const theme = isDark ? "light" : "dark";
  applyTheme(theme);
  try { localStorage.setItem("vidur-ppo-theme", theme); } catch { /* the choice then lasts as long as the page */ }
});
systemIsDark.addEventListener("change", () => applyTheme(document.documentElement.dataset.theme));
applyTheme(storedTheme());

// --- Heat map ---

const heatSelect = document.getElementById("heat-metric");
const definitions = Object.fromEntries([...document.querySelectorAll("#method tbody tr")].map((row) => [row.querySelector("code").textContent, row.lastElementChild.textContent]));

function fillHeatMap() {
  document.getElementById("heat-definition").textContent = definitions[heatSelect.value];
  for (const row of document.querySelectorAll(".heat tbody tr")) {
    const cells = data.heat[heatSelect.value][data.schedulers[row.dataset.s].label];
    row.querySelectorAll("td").forEach((cell, i) => {
      const [text, description, tone, strength] = cells[i];
      cell.textContent = text;
      cell.title = description;
      cell.dataset.tone = tone ?? "";
      cell.style.setProperty("--strength", strength);
    });
  }
}
heatSelect.addEventListener("change", fillHeatMap);
fillHeatMap();

// --- Tables ---

for (const radio of document.querySelectorAll(".segments input"))
  radio.addEventListener("change", () => (radio.closest("section").querySelector(".metrics").dataset.show = radio.value));

function sortTable(heading) {
  const table = heading.closest("table"), body = table.tBodies[0];
  const column = [...heading.parentElement.children].indexOf(heading);
  const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  table.querySelectorAll("thead th").forEach((other) => other.setAttribute("aria-sort", "none"));
  heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  const keyOf = (row) => row.children[column].dataset.v;
  const rows = [...body.rows].sort((a, b) => {
    if (!column) return direction * a.children[0].textContent.localeCompare(b.children[0].textContent);
    const [first, second] = [keyOf(a), keyOf(b)];
    if (first === "" || second === "") return (first === "") - (second === ""); // what was not measured comes last
    return direction * (Number(first) - Number(second));
  });
  body.append(...rows);
}
for (const button of document.querySelectorAll(".metrics thead button")) button.addEventListener("click", () => sortTable(button.parentElement));

// --- Charts ---

function panels(holder, scenario, draw) {
  const wanted = shownOf(scenario);
  holder.replaceChildren(...wanted.map((scheduler) => {
    const figure = htmlElement("figure");
    const caption = htmlElement("figcaption", "", figure, scheduler.label);
    htmlElement("span", "tag", caption, `seed ${data.scenarios[scenario].schedulers[scheduler.label].seed}`);
    return figure;
  }));
  wanted.forEach((scheduler, i) => draw(holder.children[i], data.scenarios[scenario].schedulers[scheduler.label], scheduler.label));
}

const drawers = {
  cdf(figure, scenario, section) {
    const name = figure.dataset.series;
    const curves = shownOf(scenario).map((scheduler) => ({ scheduler, at: data.scenarios[scenario].schedulers[scheduler.label][name] }));
    drawDistribution(figure, data.levels, curves, section.querySelector("[data-tail]").checked, `${scenario}: distribution of ${figure.querySelector("figcaption").textContent}`);
    section.querySelector(".keys").replaceChildren(...curves.map(({ scheduler }) => {
      const entry = htmlElement("span");
      entry.append(lineKey(scheduler), scheduler.label);
      return entry;
    }));
  },
  classes(figure, scenario, section) {
    const metric = section.querySelector("[data-class-metric]").value;
    const rows = shownOf(scenario).map((scheduler) => {
      const [short, long] = data.scenarios[scenario].schedulers[scheduler.label].classes[metric];
      return { scheduler, short, long };
    });
    drawClasses(figure, rows, `${scenario}: latency of short and long prompts`);
  },
  queues(holder, scenario, section) {
    const name = section.querySelector("[data-queue]").value;
    const peak = (run) => Math.max(1, ...run[name].map((queue) => Math.max(...queue)));
    const highest = Math.max(...shownOf(scenario).map((scheduler) => peak(data.scenarios[scenario].schedulers[scheduler.label])));
    const isSame = section.querySelector("[data-same]").checked;
    const colours = data.scenarios[scenario].replicaColours;
    panels(holder, scenario, (figure, run, label) => drawQueues(figure, run.time, run[name], colours, isSame ? highest : peak(run), `${label}: requests per replica over time`));
  },
  shares(holder, scenario) {
    const colours = data.scenarios[scenario].replicaColours;
    panels(holder, scenario, (figure, run, label) => drawShares(figure, run.shareTime, run.shares, colours, `${label}: share of requests per replica over time`));
  },
};

const inView = new Set();
function drawChart(holder) {
  const section = holder.closest("section");
  drawers[holder.dataset.chart](holder, section.dataset.scenario, section);
}
const stale = new Set(document.querySelectorAll("[data-chart]"));
function refresh(holders) {
  for (const holder of holders) {
    stale.add(holder);
    if (inView.has(holder)) { drawChart(holder); stale.delete(holder); }
  }
}
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) inView.add(target); else inView.delete(target);
    if (isIntersecting && stale.has(target)) { drawChart(target); stale.delete(target); }
  }
}, { rootMargin: "400px" });
const charts = [...document.querySelectorAll("[data-chart]")];
charts.forEach((holder) => watcher.observe(holder));

let lastWidth = document.documentElement.clientWidth, pending = 0;
addEventListener("resize", () => {
  if (document.documentElement.clientWidth === lastWidth) return;
  lastWidth = document.documentElement.clientWidth;
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => refresh(charts));
});
addEventListener("beforeprint", () => charts.forEach(drawChart));

for (const control of document.querySelectorAll("[data-tail], [data-class-metric], [data-queue], [data-same]"))
  control.addEventListener("change", () => refresh(control.closest("section").querySelectorAll("[data-chart]")));

// --- Which schedulers are shown, on the whole page ---

document.querySelectorAll("[data-key]").forEach((path) => styleLine(path, data.schedulers[path.dataset.key]));
for (const box of document.querySelectorAll("[data-toggle]"))
  box.addEventListener("change", () => {
    const index = Number(box.dataset.toggle);
    if (box.checked) hiddenSchedulers.delete(index); else hiddenSchedulers.add(index);
    document.querySelectorAll(`tr[data-s="${index}"]`).forEach((row) => (row.hidden = !box.checked));
    refresh(charts);
  });

if (matchMedia("(max-width: 60rem)").matches) document.getElementById("menu").open = false;
