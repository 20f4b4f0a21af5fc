"use strict";
// Charts as inline SVG. Colours are CSS variables, so a change of theme redraws nothing.

const SVG = "http://www.w3.org/2000/svg";

function svgElement(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function htmlElement(name, className, parent, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

const linear = (d0, d1, r0, r1) => (value) => r0 + ((value - d0) / (d1 - d0 || 1)) * (r1 - r0);
const logarithmic = (d0, d1, r0, r1) => {
  const scale = linear(Math.log(d0), Math.log(d1), r0, r1);
  return (value) => scale(Math.log(value));
};
const shortNumber = (value) => String(Number(value.toPrecision(3)));

// Round numbers on a logarithmic axis; between the powers of ten too where there are few of those.
function logTicks(low, high) {
  const digits = high / low < 200 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const digit of digits) {
      const tick = Number((digit * 10 ** power).toPrecision(1));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  return ticks.length ? ticks : [low, high];
}

function linearTicks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high * (1 + 1e-9); tick += step) ticks.push(Number(tick.toPrecision(6)));
  return ticks;
}

// An empty SVG of the figure's width in place of what was drawn before.
function frame(figure, height, label, margin) {
  figure.querySelectorAll("svg.chart, .tip").forEach((old) => old.remove());
  const width = Math.max(figure.clientWidth, 160);
  const svg = svgElement("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label }, figure);
  return { svg, width, height, left: margin.left, right: width - margin.right, top: margin.top, bottom: height - margin.bottom };
}

function drawAxes(box, xTicks, x, xText, yTicks, y, yText) {
  for (const tick of yTicks) {
    svgElement("path", { class: "rule", d: `M${box.left} ${y(tick)}H${box.right}` }, box.svg);
    svgElement("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, box.svg, yText(tick));
  }
  for (const tick of xTicks) {
    svgElement("path", { class: "rule", d: `M${x(tick)} ${box.top}V${box.bottom}` }, box.svg);
    svgElement("text", { x: x(tick), y: box.bottom + 15, "text-anchor": "middle" }, box.svg, xText(tick));
  }
  svgElement("path", { class: "axis", d: `M${box.left} ${box.bottom}H${box.right}` }, box.svg);
}

// A box beside the pointer: a title, and rows of [key, name, value]; key is an element.
function showTip(figure, box, title, rows, atX, atY) {
  let tip = figure.querySelector(".tip");
  if (!tip) {
    tip = htmlElement("div", "tip", figure);
    tip.setAttribute("role", "status");
  }
  tip.replaceChildren(htmlElement("strong", "", null, title));
  for (const [key, name, value] of rows) {
    const row = htmlElement("div", "", tip);
    row.append(key);
    htmlElement("span", "", row, name);
    htmlElement("span", "", row, value);
  }
  tip.hidden = false;
  const offset = box.svg.getBoundingClientRect().top - figure.getBoundingClientRect().top;
  const room = figure.clientWidth - tip.offsetWidth;
  const left = atX + 16 <= room ? atX + 16 : atX - 16 - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(left, room))}px`;
  tip.style.top = `${offset + Math.max(0, Math.min(atY + 12, box.height - tip.offsetHeight))}px`;
}

const hideTip = (figure) => figure.querySelectorAll(".tip").forEach((tip) => (tip.hidden = true));

function lineKey(scheduler) {
  const svg = svgElement("svg", { class: "key", viewBox: "0 0 22 8", "aria-hidden": "true" });
  styleLine(svgElement("path", { d: "M1 4H21" }, svg), scheduler);
  return svg;
}

function styleLine(path, scheduler) {
  path.style.stroke = `var(--s${scheduler.slot})`;
  if (scheduler.dash) path.style.strokeDasharray = scheduler.dash;
}

function colourKey(colour) {
  const key = htmlElement("i");
  key.style.background = colour;
  return key;
}

// Cumulative distributions on a logarithmic time axis. Curves: {scheduler, at: time at each level, null beyond all limits}.
function drawDistribution(figure, levels, curves, tail, label) {
  const box = frame(figure, 300, label, { left: 44, right: 14, top: 10, bottom: 26 });
  const times = curves.flatMap((curve) => curve.at).filter((time) => time > 0);
  if (!times.length) return;
  const low = Math.min(...times), high = Math.max(...times);
  const x = logarithmic(low, high > low ? high : low * 1.01, box.left, box.right);
  const bent = tail ? (level) => -Math.log10(1 - level) : (level) => level;
  const scale = linear(0, bent(tail ? levels[levels.length - 1] : 1), box.bottom, box.top);
  const y = (level) => scale(bent(level));
  const yTicks = tail ? [0, 0.5, 0.9, 0.99, 0.999] : [0, 0.2, 0.4, 0.6, 0.8, 1];
  drawAxes(box, logTicks(low, high), x, shortNumber, yTicks, y, (tick) => `${Number((tick * 100).toFixed(1))}%`);
  for (const curve of curves) {
    const points = curve.at.map((time, i) => (time > 0 ? `${x(time).toFixed(1)} ${y(levels[i]).toFixed(1)}` : null));
    const path = svgElement("path", { class: "line", d: "M" + points.filter(Boolean).join("L") }, box.svg);
    if (curve.scheduler.slot < 0) path.classList.add("reference-line");
    styleLine(path, curve.scheduler);
  }
  readQuantiles(figure, box, levels, curves, x, y);
}

// The pointer's height, or the arrow keys, choose a level; the box lists every curve's time there.
function readQuantiles(figure, box, levels, curves, x, y) {
  const cursor = svgElement("path", { class: "cursor", visibility: "hidden" }, box.svg);
  const dots = curves.map((curve) => {
    const dot = svgElement("circle", { r: 3.5, visibility: "hidden" }, box.svg);
    dot.style.fill = `var(--s${curve.scheduler.slot})`;
    return dot;
  });
  let current = levels.findIndex((level) => level >= 0.5);
  const show = (index) => {
    current = Math.max(0, Math.min(index, levels.length - 1));
    const height = y(levels[current]);
    cursor.setAttribute("d", `M${box.left} ${height}H${box.right}`);
    cursor.setAttribute("visibility", "visible");
    dots.forEach((dot, i) => {
      const time = curves[i].at[current];
      dot.setAttribute("visibility", time > 0 ? "visible" : "hidden");
      if (time > 0) { dot.setAttribute("cx", x(time)); dot.setAttribute("cy", height); }
    });
    const order = [...curves].sort((a, b) => (a.at[current] ?? Infinity) - (b.at[current] ?? Infinity));
    const rows = order.map((curve) => [lineKey(curve.scheduler), curve.scheduler.label, curve.at[current] === null ? "never" : `${shortNumber(curve.at[current])} s`]);
    // At the side that the curves leave free.
    const reached = curves.map((curve) => curve.at[current]).filter((time) => time > 0);
    const middle = reached.reduce((sum, time) => sum + x(time), 0) / reached.length;
    const side = middle > (box.left + box.right) / 2 ? -Infinity : Infinity;
    showTip(figure, box, `P${Number((levels[current] * 100).toFixed(2))}`, rows, side, height);
  };
  const hide = () => {
    hideTip(figure);
    [cursor, ...dots].forEach((mark) => mark.setAttribute("visibility", "hidden"));
  };
  box.svg.tabIndex = 0;
  box.svg.addEventListener("pointermove", (event) => {
    const bounds = box.svg.getBoundingClientRect();
    const height = event.clientY - bounds.top;
    const distances = levels.map((level) => Math.abs(y(level) - height));
    show(distances.indexOf(Math.min(...distances)));
  });
  box.svg.addEventListener("pointerleave", hide);
  box.svg.addEventListener("blur", hide);
  box.svg.addEventListener("keydown", (event) => {
    const target = { ArrowUp: current + 1, ArrowDown: current - 1, Home: 0, End: levels.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (target === undefined) return;
    event.preventDefault();
    show(target);
  });
}

// Short and long prompts of each scheduler, joined by a line. Rows: {scheduler, short, long}; null where there is none.
function drawClasses(figure, rows, label) {
  const names = Math.min(190, figure.clientWidth * 0.36);
  const box = frame(figure, rows.length * 26 + 34, label, { left: names, right: 20, top: 4, bottom: 26 });
  const times = rows.flatMap((row) => [row.short, row.long]).filter((time) => time > 0);
  if (!times.length) return;
  const low = Math.min(...times) * 0.9, high = Math.max(...times) * 1.1;
  const x = logarithmic(low, high, box.left, box.right);
  drawAxes(box, logTicks(low, high), x, shortNumber, [], null, null);
  rows.forEach((row, i) => {
    const y = box.top + 26 * i + 13;
    const room = Math.floor((names - 8) / 6.6);
    const name = row.scheduler.label;
    const text = svgElement("text", { class: "label", x: names - 8, y: y + 4, "text-anchor": "end" }, box.svg, name.length > room ? `${name.slice(0, room - 1)}…` : name);
    const both = ["short", "long"].filter((size) => row[size] > 0);
    svgElement("title", {}, text, `${name}: ${both.map((size) => `${size} ${shortNumber(row[size])} s`).join(", ")}`);
    if (both.length === 2) svgElement("path", { class: "axis", d: `M${x(row.short)} ${y}H${x(row.long)}` }, box.svg);
    for (const size of both) {
      const shape = size === "short" ? svgElement("circle", { cx: x(row[size]), cy: y, r: 5 }, box.svg) : svgElement("rect", { x: x(row[size]) - 4.5, y: y - 4.5, width: 9, height: 9 }, box.svg);
      shape.style.fill = `var(--${size})`;
      svgElement("title", {}, shape, `${name}, ${size}: ${shortNumber(row[size])} s`);
    }
  });
}

// A line for each replica over time.
function drawQueues(figure, time, values, colours, highest, label) {
  const box = frame(figure, 150, label, { left: 34, right: 8, top: 6, bottom: 22 });
  const x = linear(time[0], time[time.length - 1], box.left, box.right);
  const y = linear(0, highest, box.bottom, box.top);
  drawAxes(box, linearTicks(time[0], time[time.length - 1], 4), x, (tick) => `${tick} s`, linearTicks(0, highest, 3), y, shortNumber);
  values.forEach((queue, replica) => {
    const d = "M" + queue.map((value, i) => `${x(time[i]).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
    svgElement("path", { class: "line thin", d }, box.svg).style.stroke = colours[replica];
  });
  readReplicas(figure, box, time, values, colours, x, (value) => String(value));
}

// Stacked shares of the replicas: a column for each group of requests.
function drawShares(figure, time, shares, colours, label) {
  const box = frame(figure, 120, label, { left: 34, right: 8, top: 6, bottom: 22 });
  const edges = time.map((at, i) => (i ? (at + time[i - 1]) / 2 : at)).concat(time[time.length - 1]);
  const x = linear(edges[0], edges[edges.length - 1], box.left, box.right);
  const y = linear(0, 1, box.bottom, box.top);
  drawAxes(box, linearTicks(time[0], time[time.length - 1], 4), x, (tick) => `${tick} s`, [0, 0.5, 1], y, (tick) => `${tick * 100}%`);
  let below = time.map(() => 0);
  shares.forEach((share, replica) => {
    const above = below.map((value, i) => value + share[i]);
    const outline = (levels) => levels.flatMap((level, i) => [[edges[i], level], [edges[i + 1], level]]).map(([at, level]) => `${x(at).toFixed(1)} ${y(level).toFixed(1)}`);
    const d = `M${[...outline(above), ...outline(below).reverse()].join("L")}Z`;
    svgElement("path", { d, fill: colours[replica] }, box.svg);
    below = above;
  });
  readReplicas(figure, box, time, shares, colours, x, (value) => `${(value * 100).toFixed(0)}%`);
}

// The box lists the replicas at the pointer's time; of many, those with the most.
function readReplicas(figure, box, time, values, colours, x, format) {
  const mostListed = 8;
  box.svg.addEventListener("pointermove", (event) => {
    const bounds = box.svg.getBoundingClientRect();
    const atX = event.clientX - bounds.left;
    const distances = time.map((at) => Math.abs(x(at) - atX));
    const nearest = distances.indexOf(Math.min(...distances));
    let rows = values.map((queue, replica) => [replica, queue[nearest]]);
    if (rows.length > mostListed) rows = rows.sort((a, b) => b[1] - a[1]).slice(0, mostListed);
    showTip(figure, box, `${shortNumber(time[nearest])} s`, rows.map(([replica, value]) => [colourKey(colours[replica]), `replica ${replica}`, format(value)]), atX, 0);
  });
  box.svg.addEventListener("pointerleave", () => hideTip(figure));
}
