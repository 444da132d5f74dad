"use strict";
// Draws the page from the JSON island. One `state`, changed by the controls; `draw` makes every chart again from it.
// Text enters the page through textContent only, so a name is never read as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const groups = data.groups;
const state = { hidden: new Set(), range: "all", reads: "all", rows: "applied", step: Infinity, log: {} };
const host = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const vector = ["svg", "g", "path", "line", "rect", "circle", "text"].includes(tag);
  const node = vector ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const colour = (group) => `c${group.colour % 8}`;
const again = (group) => (group.colour > 7 ? " again" : "");  // a colour used a second time is broken or hollow
const swatch = (group) => make("i", { class: `key ${colour(group)}${again(group)}` });
const empty = (where, words) => where.replaceChildren(make("p", { class: "empty" }, words));

// Numbers

const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
const known = (values) => values.filter((value) => value !== null && value !== undefined);
const minus = (words) => words.replace("-", "−");
function short(value, digits = 4) {
  if (value === null || value === undefined) return "—";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return minus(value.toExponential(2));
  return minus(String(Number(value.toPrecision(digits))));
}
const loss = (value) => (value === null ? "—" : minus(value.toFixed(4)));
function unitOf(top) {
  return [[1e12, "trillion "], [1e9, "billion "], [1e6, "million "], [1e3, "thousand "]].find(([size]) => top >= size) || [1, ""];
}
function many(value) {
  const [size, name] = unitOf(value);
  return `${Number((value / size).toPrecision(3))} ${name}`.trim();
}
function linearTicks(low, high, count) {
  const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) + step * 1e-9; k++) ticks.push(k * step);
  return ticks.map((value) => ({ value, label: minus((Math.abs(value) < step / 1e6 ? 0 : value).toFixed(Math.min(places, 12))) }));
}
function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), decades = Math.log10(high / low), ticks = [];
  const stride = Math.max(1, Math.ceil((last - first) / (2 * count)));
  const steps = decades < 1.3 ? [1, 2, 5] : decades < 2.6 ? [1, 3] : [1];
  for (let power = first; power <= last; power += stride)
    for (const m of steps) {
      const value = m * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push({ value, label: Math.abs(power) < 4 ? String(Number(value.toPrecision(1))) : minus(`${m}e${power}`) });
    }
  return ticks;
}

// Axes: the y title stands above the plot and the x title below its right end, so that no text is turned.

function axes(where, { height, x, y, xTitle, yTitle, xTicks, yLog, label, square }) {
  const width = Math.max(200, where.clientWidth);
  const yTicks = (yLog ? logTicks : linearTicks)(y[0], y[1], Math.max(3, Math.round(height / 55)));
  const left = 12 + 7.4 * Math.max(...yTicks.map((tick) => tick.label.length), 2);
  const box = { left, top: 24, right: width - 10, bottom: height - 40 };
  const place = (v, [a, b], from, to) => from + ((v - a) / (b - a || 1)) * (to - from);
  const bend = yLog ? Math.log10 : (v) => v;
  const X = (v) => place(v, x, box.left, box.right), Y = (v) => place(bend(v), y.map(bend), box.bottom, box.top);
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, tabindex: 0 });
  for (const { value, label: words } of yTicks) {
    svg.append(make("line", { class: "gridline", x1: box.left, x2: box.right, y1: Y(value), y2: Y(value) }));
    svg.append(make("text", { x: box.left - 7, y: Y(value) + 4, "text-anchor": "end" }, words));
  }
  for (const { value, label: words } of xTicks(box.right - box.left)) {
    svg.append(make("line", { class: "axis", x1: X(value), x2: X(value), y1: box.bottom, y2: box.bottom + 4 }));
    svg.append(make("text", { x: X(value), y: box.bottom + 17, "text-anchor": "middle" }, words));
  }
  svg.append(make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  svg.append(make("text", { class: "name", x: 0, y: 11 }, yTitle));
  svg.append(make("text", { x: box.right, y: height - 4, "text-anchor": "end" }, xTitle));
  where.replaceChildren(svg);
  return { svg, X, Y, box };
}
function path(xs, ys, X, Y, from = -Infinity) {
  let d = "", pen = "M";
  ys.forEach((value, i) => {
    if (value === null || xs[i] < from) { pen = "M"; return; }
    d += `${pen}${X(xs[i]).toFixed(1)},${Y(value).toFixed(1)}`;
    pen = "L";
  });
  return d;
}

// Hovering, touching and the arrow keys all choose a point; `show` marks it and returns what to say about it.

function explore(svg, { locate, move, show }) {
  let point = null;
  const tip = host("tip"), mark = svg.appendChild(make("g"));
  const leave = () => { point = null; tip.hidden = true; mark.replaceChildren(); };
  const choose = (next) => {
    if (next === null) return leave();
    point = next;
    const { title, lines, at, marks } = show(point);
    mark.replaceChildren(...marks);
    tip.replaceChildren(make("b", {}, title), ...lines.map(([key, name, value]) => make("div", {}, ...(key ? [key] : []), make("span", {}, name), make("span", {}, value))));
    tip.hidden = false;
    const edge = svg.getBoundingClientRect(), x = edge.left + at[0], y = edge.top + at[1];
    const besides = x + 16 + tip.offsetWidth < innerWidth ? x + 16 : x - 16 - tip.offsetWidth;
    tip.style.left = `${Math.max(8, Math.min(besides, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y - tip.offsetHeight - 12, innerHeight - tip.offsetHeight - 8))}px`;
  };
  const pointer = (event) => {
    const edge = svg.getBoundingClientRect();
    choose(locate(event.clientX - edge.left, event.clientY - edge.top));
  };
  svg.addEventListener("pointermove", pointer);
  svg.addEventListener("pointerdown", pointer);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    choose(move(point, ...step));
  });
}
const nearest = (values, wanted) => values.reduce((best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// Loss

function drawCurves(kind, title, height, nothing) {
  const where = host(kind), all = groups.filter((group) => group.curves[kind].runs.length);
  const shown = all.filter((group) => !state.hidden.has(group) && !(kind === "difference" && group.baseline));
  if (!all.some((group) => known(group.curves[kind].runs.flatMap((run) => run.y)).length && !(kind === "difference" && group.baseline))) return empty(where, nothing);
  const lines = shown.flatMap((group) => group.curves[kind].runs.concat(group.curves[kind].mean));
  const end = Math.max(1, ...all.flatMap((group) => group.curves[kind].runs.map((run) => run.x.at(-1))));
  const from = { all: 0, half: end / 2, tenth: end * 0.9 }[state.range];
  const values = lines.flatMap((line) => known(line.y.filter((_, i) => line.x[i] >= from)));
  if (kind === "difference") values.push(0);
  const [low, high] = values.length ? extent(values) : [0, 1];
  const pad = (high - low) * 0.05 || 0.05;
  const [size, unit] = unitOf(end);
  const ends = shown.map((group) => `${group.label} ends at ${loss(known(group.curves[kind].runs[0].y).at(-1) ?? null)}`).join("; ");
  const { svg, X, Y, box } = axes(where, {
    height, x: [from, end], y: [low - pad, high + pad], yTitle: title, xTitle: `${unit}tokens`, label: `${title} by tokens. ${ends}.`,
    xTicks: (room) => linearTicks(from / size, end / size, clamp(Math.round(room / 90), 2, 10)).map((tick) => ({ value: tick.value * size, label: tick.label })),
  });
  if (kind === "difference") svg.append(make("line", { class: "zero", x1: box.left, x2: box.right, y1: Y(0), y2: Y(0) }));
  for (const group of shown) {
    const { runs, mean } = group.curves[kind];
    if (runs.length > 1) for (const run of runs) svg.append(make("path", { class: `line thin ${colour(group)}`, d: path(run.x, run.y, X, Y, from) }));
    svg.append(make("path", { class: `line mean ${colour(group)}${again(group)}`, d: path(mean.x, mean.y, X, Y, from) }));
  }
  const xs = [...new Set(shown.flatMap((group) => group.curves[kind].mean.x))].filter((x) => x >= from).sort((a, b) => a - b);
  if (!xs.length) return;
  explore(svg, {
    locate: (px) => nearest(xs.map(X), px),
    move: (i, dx) => clamp((i ?? xs.length) + dx, 0, xs.length - 1),
    show: (i) => {
      const marks = [make("line", { class: "cursor", x1: X(xs[i]), x2: X(xs[i]), y1: box.top, y2: box.bottom })], words = [];
      for (const group of shown) {
        const { mean, runs } = group.curves[kind], j = nearest(mean.x, xs[i]), value = mean.y[j] ?? null;
        if (!mean.x.length || Math.abs(mean.x[j] - xs[i]) > end / 20) continue;
        const seeds = known(runs.map((run) => run.y[nearest(run.x, mean.x[j])]));
        const range = seeds.length > 1 ? ` (${loss(Math.min(...seeds))} to ${loss(Math.max(...seeds))})` : "";
        words.push([swatch(group), group.label, loss(value) + range]);
        if (value !== null) marks.push(make("circle", { class: `dot ${colour(group)}`, cx: X(mean.x[j]), cy: Y(value), r: 3.5 }));
      }
      return { title: `${many(xs[i])} tokens`, lines: words, marks, at: [X(xs[i]), box.top + 70] };
    },
  });
}
function drawLegend() {
  host("legend").replaceChildren(...groups.map((group) => {
    const button = make("button", { type: "button", "aria-pressed": String(!state.hidden.has(group)) }, swatch(group), make("code", {}, group.label));
    button.addEventListener("click", () => {
      if (!state.hidden.delete(group)) state.hidden.add(group);
      button.setAttribute("aria-pressed", String(!state.hidden.has(group)));
      drawLoss();
    });
    return button;
  }));
}
function drawLoss() {
  drawCurves("eval", "validation loss, nats per token", 340, "No evaluation was recorded.");
  drawCurves("train", "training loss, nats per token", 270, "No training loss was recorded.");
  const lone = groups.length === 1 ? "There is nothing to subtract: the page shows one residual." : "No run has an evaluated baseline (the standard residual) with the same settings and seed.";
  drawCurves("difference", "difference in nats per token; below zero is better", 270, lone);
  const recorded = Math.max(...groups.flatMap((group) => ["eval", "train"].map((kind) => group.curves[kind].recorded)));
  const thinned = recorded > data.points ? `Curves are thinned for this page: at most ${data.points} of up to ${recorded} recorded points each. ` : "";
  const average = Math.max(...groups.map((group) => group.curves.train.window));
  host("thinned").textContent = `${thinned}Training loss is a moving average over ${average} records.`;
}

// Depth: every residual shows its last recorded step up to the chosen one.

const deep = groups.filter((group) => group.depth);
const steps = [...new Map(deep.flatMap((group) => group.depth.frames.map((frame) => [frame.step, frame]))).values()].sort((a, b) => a.step - b.step);
const frameOf = (group) => group.depth.frames.findLast((frame) => frame.step <= state.step) || group.depth.frames[0];
const kinds = [...new Set(deep.flatMap((group) => group.depth.kinds))];
const hollow = (kind) => (kinds.indexOf(kind) > 0 ? " hollow" : "");
const readName = (group, row) => (row < group.depth.kinds.length ? `Read ${row}, before ${group.depth.kinds[row]}` : "Final read");
const sourceName = (group, column) => (column ? `output of sublayer ${column - 1}, ${group.depth.kinds[column - 1]}` : "embedding");
const parts = (name) => name.split(/(?<=[:,])/).flatMap((part) => [part, make("wbr")]);  // a long name breaks between its options
const panelTitle = (group) => make("p", {}, swatch(group), make("code", {}, ...parts(group.label)));

function row(group, frame, read) {
  const start = (read * (read + 1)) / 2, values = frame.mixing.slice(start, start + read + 1);
  if (state.rows === "applied") return values;
  const total = values.reduce((sum, value) => sum + Math.abs(value ?? 0), 0) || 1;
  return values.map((value) => (value === null ? null : value / total));
}
function ramp(name) {
  const stops = getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(/\s+/)
    .map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  return (share) => {
    const at = clamp(share, 0, 1) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
    return `rgb(${stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i))).join(" ")})`;
  };
}
function drawMaps() {
  const mapped = deep.filter((group) => group.depth.frames.some((frame) => frame.mixing));
  if (!mapped.length) return empty(host("maps"), "No depth-mixing weights were recorded.");
  const every = mapped.flatMap((group) => group.depth.frames.filter((f) => f.mixing).flatMap((f) => group.depth.kinds.concat("final").flatMap((_, r) => known(row(group, f, r)))));
  const bounds = extent(every.concat(0));
  // The first reads have few sources and so large weights; the scale ends below the largest hundredth, or they would fade the rest.
  const sizes = every.map(Math.abs).sort((a, b) => a - b), top = sizes.at(-1) || 1, cut = sizes[Math.floor(sizes.length * 0.99)] || top;
  const most = cut < 0.9 * top ? cut : top, warm = ramp("--heat"), cold = ramp("--cold");
  // The root of the weight: a share of a tenth among fifty sources is much, and must not look like none.
  const paint = (value) => (value < 0 ? cold : warm)(Math.sqrt(Math.abs(value) / most));
  drawScale(most, most < top, bounds[0] < 0, paint);
  host("maps").replaceChildren(...mapped.map((group) => {
    const map = make("div", { class: "map" });
    return Object.assign(make("div", { class: "panel" }, panelTitle(group), map), { paint: () => drawMap(map, group, paint) });
  }), ...groups.filter((group) => !mapped.includes(group)).map((group) => make("div", { class: "panel" }, panelTitle(group), make("p", { class: "empty" }, "No depth records."))));
  for (const panel of host("maps").children) if (panel.paint) panel.paint();
}
function drawScale(most, clipped, signed, paint) {
  const width = 190, from = signed ? -1 : 0, svg = make("svg", { width: width + 30, height: 42, role: "img", "aria-label": `Colour scale, 0 to ${short(most, 2)}` });
  const X = (share) => 8 + ((share - from) / (1 - from)) * width;
  svg.append(make("text", { class: "name", x: 8, y: 11 }, state.rows === "applied" ? "weight, same scale in all maps" : "share of the row, same scale"));
  for (let i = 0; i < 60; i++) {
    const share = from + ((i + 0.5) / 60) * (1 - from);
    svg.append(make("rect", { x: 8 + (i * width) / 60, y: 16, width: width / 60 + 0.5, height: 9, fill: paint(Math.sign(share) * share * share * most) }));
  }
  for (const part of signed ? [0, 0.25, 1] : [0, 0.05, 0.2, 0.5, 1]) {
    for (const sign of signed && part > 0 ? [-1, 1] : [1]) {
      svg.append(make("text", { x: X(sign * Math.sqrt(part)), y: 38, "text-anchor": "middle" }, (clipped && part === 1 && sign > 0 ? "≥ " : "") + short(sign * part * most, 2)));
    }
  }
  host("scale").replaceChildren(svg);
}
function drawMap(where, group, paint) {
  const frame = frameOf(group), count = group.depth.kinds.length, columns = count + 1;
  if (!frame.mixing) return empty(where, `No depth-mixing weights at step ${frame.step}.`);
  const reads = [...group.depth.kinds.keys()].filter((i) => state.reads === "all" || group.depth.kinds[i] === state.reads).concat(count);
  const box = { left: 46, top: 4 };
  const room = Math.min(560, where.clientWidth - box.left - 4), gap = 5;
  const size = clamp(Math.floor((room / columns) * 2) / 2, 3, 30);
  const tall = (size * columns - gap) / reads.length;
  const X = (column) => box.left + column * size, Y = (r) => box.top + r * tall + (r === reads.length - 1 ? gap : 0);
  const right = X(columns), bottom = Y(reads.length - 1) + tall;
  const svg = make("svg", { width: Math.max(right + 4, 230), height: bottom + 44, role: "img", tabindex: 0, "aria-label": `Depth-mixing map of ${group.label}: ${reads.length} reads by ${columns} sources` });
  const dense = devicePixelRatio || 1, canvas = make("canvas", { width: Math.ceil((right - box.left) * dense), height: Math.ceil((bottom - box.top) * dense) });
  Object.assign(canvas.style, { left: `${box.left}px`, top: `${box.top}px`, width: `${right - box.left}px`, height: `${bottom - box.top}px` });
  const pen = canvas.getContext("2d"), snap = (v) => Math.round(v * dense), values = reads.map((read) => row(group, frame, read));
  let cells = 0;
  values.forEach((weights, r) => weights.forEach((weight, column) => {
    if (weight === null) return;
    cells++;
    const [x0, x1, y0, y1] = [column * size, (column + 1) * size, Y(r) - box.top, Y(r) - box.top + tall].map(snap), seam = size > 8 ? 1 : 0;
    pen.fillStyle = paint(weight);
    pen.fillRect(x0, y0, x1 - x0 - seam, y1 - y0 - (tall > 8 ? 1 : 0));
  }));
  canvas.dataset.cells = cells;
  const strip = (kind, x, y, w, h) => svg.append(make("rect", { class: `kind${hollow(kind)}`, x, y, width: w, height: h, "stroke-width": 0.6 }));
  reads.slice(0, -1).forEach((read, r) => strip(group.depth.kinds[read], box.left - 8, Y(r) + tall * 0.14, 4, tall * 0.72));
  group.depth.kinds.forEach((kind, i) => strip(kind, X(i + 1) + size * 0.14, bottom + 4, size * 0.72, 4));
  const every = (space, needed) => [1, 2, 4, 8, 16, 32, 64].find((stride) => stride * space >= needed) || 128;
  const down = every(tall, 15), across = every(size, 22);
  reads.forEach((read, r) => {
    const last = r === reads.length - 1;
    if (last || (r % down === 0 && (reads.length - 1 - r) * tall >= 13)) svg.append(make("text", { x: box.left - 13, y: Y(r) + tall / 2 + 4, "text-anchor": "end", class: last ? "name" : "" }, last ? "final" : String(read)));
  });
  for (let i = 0; i < count; i += across) if (i || size >= 22) svg.append(make("text", { x: X(i + 1.5), y: bottom + 21, "text-anchor": "middle" }, String(i)));
  svg.append(make("text", { class: "name", x: X(0.5), y: bottom + 21, "text-anchor": "middle" }, "emb"), make("text", { x: 0, y: bottom + 38 }, "rows: reads, columns: sources"));
  where.replaceChildren(canvas, svg);
  explore(svg, {
    locate: (px, py) => {
      const column = Math.floor((px - box.left) / size), r = Math.min(reads.length - 1, Math.floor((py - box.top - (py >= Y(reads.length - 1) ? gap : 0)) / tall));
      return r >= 0 && column >= 0 && column <= reads[r] && py <= bottom ? [r, column] : null;
    },
    move: (point, dx, dy) => {
      const r = clamp((point ? point[0] : reads.length - 1) + dy, 0, reads.length - 1);
      return [r, clamp((point ? point[1] : 0) + dx, 0, reads[r])];
    },
    show: ([r, column]) => ({
      title: readName(group, reads[r]), lines: [[null, sourceName(group, column), short(values[r][column], 3)]],
      marks: [make("rect", { class: "cursor cell", x: X(column), y: Y(r), width: size, height: tall })], at: [X(column) - where.scrollLeft, Y(r)],
    }),
  });
}

const MEASURES = [
  ["output", "Output magnitude", "RMS of each sublayer's output, before it is added or stored.", "output RMS"],
  ["read", "Read magnitude", "RMS of what each read returned, before its norm; the square is the final read.", "read RMS"],
  ["gradient", "Gradient norm", "Norm of the gradient of each sublayer's parameters.", "gradient norm"],
  ["entropy", "Entropy of the depth weights", "How widely each read spreads its weights; the dotted line is an even spread over everything before it.", "entropy, nats"],
];
function drawMeasures() {
  if (!deep.length) return empty(host("measures"), "No depth records: norms, gradients and entropy were not recorded.");
  host("measures").replaceChildren(...MEASURES.map(([key, title, words, unit]) => {
    const panels = make("div", { class: "grid" }), caption = make("figcaption", {}, make("h3", {}, title));
    const figure = make("figure", { id: `measure-${key}` }, caption, panels);
    const withValues = deep.filter((group) => group.depth.frames.some((frame) => frame[key] && known(frame[key]).length));
    const positive = withValues.flatMap((group) => group.depth.frames.flatMap((frame) => known(frame[key] || []))).filter((value) => value > 0);
    const domain = extent(positive);
    if (key !== "entropy" && positive.length) {
      state.log[key] ??= domain[1] / domain[0] > 30 ? "log" : "linear";
      caption.append(choice(`scale-${key}`, "", [["linear", "linear"], ["log", "log"]], () => state.log[key], (value) => { state.log[key] = value; fill(); }));
    }
    caption.append(make("p", {}, words));
    const fill = () => {
      if (!positive.length) return empty(panels, "Not recorded.");
      const log = state.log[key] === "log", y = log ? [domain[0] / 1.15, domain[1] * 1.15] : [0, domain[1] * 1.06];
      const hosts = withValues.map((group) => [group, make("div", { class: "chart" })]);
      panels.replaceChildren(...hosts.map(([group, chart]) => make("div", { class: "panel" }, panelTitle(group), chart)));
      for (const [group, chart] of hosts) drawMeasure(chart, group, withValues, key, unit, y, log);
    };
    return Object.assign(figure, { fill });
  }));
  for (const figure of host("measures").children) figure.fill();
}
function drawMeasure(where, group, all, key, unit, y, log) {
  const values = frameOf(group)[key] || [], count = group.depth.kinds.length, longest = Math.max(...all.map((other) => other.depth.kinds.length));
  const { svg, X, Y, box } = axes(where, {
    height: 210, x: [-0.5, longest + 0.5], y, yLog: log, yTitle: unit, xTitle: "sublayer", label: `${unit} by sublayer of ${group.label}${log ? ", log scale" : ""}`,
    xTicks: (room) => linearTicks(0, longest - 1, Math.max(1, Math.min(longest - 1, Math.floor(room / 42)))).filter((tick) => Number.isInteger(tick.value)),
  });
  const usable = (value) => (value === null || value === undefined || (log && value <= 0) ? null : value);
  const lines = (other, style) => {
    const numbers = frameOf(other)[key] || [];
    for (const kind of new Set(other.depth.kinds)) {
      const at = [...other.depth.kinds.keys()].filter((i) => other.depth.kinds[i] === kind);
      svg.append(make("path", { class: `line depth-line ${style}`, d: path(at, at.map((i) => usable(numbers[i])), X, Y) }));
    }
  };
  for (const other of all) if (other !== group) lines(other, "ghost");
  if (key === "entropy") {
    const reads = [...Array(count + 1).keys()];
    svg.append(make("path", { class: "line reference", d: path(reads, reads.map((i) => (Math.log(i + 1) <= y[1] ? Math.log(i + 1) : null)), X, Y) }));
  }
  lines(group, colour(group));
  const radius = clamp((X(1) - X(0)) * 0.34, 1.1, 3);
  values.forEach((value, i) => {
    if (usable(value) === null) return;
    if (i < count) svg.append(make("circle", { class: `dot ${colour(group)}${hollow(group.depth.kinds[i])}`, cx: X(i), cy: Y(value), r: radius }));
    else svg.append(make("rect", { class: `dot ${colour(group)}`, x: X(i) - 3, y: Y(value) - 3, width: 6, height: 6 }));
  });
  explore(svg, {
    locate: (px) => clamp(Math.round(((px - X(0)) / (X(1) - X(0)))), 0, values.length - 1),
    move: (i, dx) => clamp((i ?? -1) + dx, 0, values.length - 1),
    show: (i) => ({
      title: i < count ? (values.length > count ? readName(group, i) : `Sublayer ${i}, ${group.depth.kinds[i]}`) : "Final read",
      lines: [group, ...all.filter((other) => other !== group)].map((other) => [swatch(other), other.label, short((frameOf(other)[key] || [])[i] ?? null)]),
      marks: [make("line", { class: "cursor", x1: X(i), x2: X(i), y1: box.top, y2: box.bottom })], at: [X(i), box.top + 60],
    }),
  });
}

// Controls

function choice(name, title, options, current, change) {
  const field = make("fieldset", { class: "choice", "aria-label": title || name }, ...(title ? [make("legend", {}, title)] : []));
  for (const [value, words] of options) {
    const input = make("input", { type: "radio", name, value });
    input.checked = value === current();
    input.addEventListener("change", () => change(value));
    field.append(make("label", {}, input, words));
  }
  return field;
}
function addControls() {
  const set = (key, redraw) => [() => state[key], (value) => { state[key] = value; redraw(); }];
  host("range").append(choice("range", "", [["all", "whole run"], ["half", "last half"], ["tenth", "last tenth"]], ...set("range", drawLoss)));
  if (!deep.length) return;
  host("reads").append(choice("reads", "Reads", [["all", "all"], ...kinds.map((kind) => [kind, `before ${kind}`])], ...set("reads", drawMaps)));
  host("rows").append(choice("rows", "Weights", [["applied", "as applied"], ["share", "each row sums to one"]], ...set("rows", drawMaps)));
  host("kinds").append("Marks beside the rows, under the columns and in the charts below: ", ...kinds.slice(0, 2).map((kind) => {
    const more = kinds.indexOf(kind) && kinds.length > 2 ? "other sublayers" : kind;
    return make("span", {}, make("svg", { width: 10, height: 10 }, make("circle", { class: `kind${hollow(kind)}`, cx: 5, cy: 5, r: 4 })), more);
  }));
  const last = steps.at(-1), words = (frame) => `step ${frame.step} · ${many(frame.tokens)} tokens`;
  host("frames").textContent = deep.some((group) => group.depth.recorded > group.depth.frames.length) ? `Thinned for this page: ${steps.length} of ${Math.max(...deep.map((group) => group.depth.recorded))} depth records.` : "";
  if (steps.length < 2) return void host("slider").append(make("output", {}, `Recorded at ${words(last)}`));
  const input = make("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Training step of the depth charts", "aria-valuetext": words(last) });
  const output = make("output", {}, words(last));
  input.addEventListener("input", () => {
    const frame = steps[input.value];
    state.step = frame.step;
    output.textContent = words(frame);
    input.setAttribute("aria-valuetext", words(frame));
    drawMaps();
    drawMeasures();
  });
  host("slider").append(input, output);
}

function draw() {
  drawLoss();
  drawMaps();
  drawMeasures();
}
drawLegend();
addControls();
draw();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
