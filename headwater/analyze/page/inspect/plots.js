// Weight against effect, and magnitude by depth.

const SQUARE = new Set(["mlp", "moe"]);  // and the embedding; what mixes tokens is round

function drawScatter() {
  const panels = models.map((model) => make("div", { class: "panel" }, panelTitle(model), make("div", { class: "chart" }), make("p", { class: "caption" })));
  host("scatter").replaceChildren(...panels);
  models.forEach((model, i) => scatter(panels[i].querySelector(".chart"), panels[i].lastChild, model));
}
const along = () => (state.value === "brought" ? { of: broughtOf, name: "weight × size", column: "weight_times_size" } : { of: sharesOf, name: "share of the row", column: "share" });
function pointsOf(model) {
  const { of } = along();
  if (chosen() !== null && nextOf() === null) return [];
  if (model.removedAt) return Array.from({ length: model.depth + 1 }, (_, read) => {
    const effects = effectsOf(model, read);
    return of(model, read).map((value, source) => ({ read, source, x: Math.abs(value), y: effects[source] }));
  }).flat().filter(({ read }) => read > 0);  // the first read has one source
  if (!model.removed) return [];
  return Array.from({ length: model.depth + 1 }, (_, source) => {
    const reads = Array.from({ length: model.depth + 1 - source }, (_, i) => Math.abs(of(model, source + i)[source]));
    return { read: null, source, x: average(reads), y: effectOf(model, source) };
  });
}
const ranks = (values) => { const order = [...values.keys()].sort((a, b) => values[a] - values[b]), found = []; order.forEach((i, rank) => (found[i] = rank)); return found; };
function rankCorrelation(points) {
  const [a, b] = [ranks(points.map(({ x }) => x)), ranks(points.map(({ y }) => Math.abs(y)))], mean = (points.length - 1) / 2;
  const along = (u, v) => u.reduce((sum, value, i) => sum + (value - mean) * (v[i] - mean), 0);
  return along(a, b) / (along(a, a) || 1);
}
function scatter(where, caption, model) {
  const points = pointsOf(model);
  if (!points.length) return empty(where, model.removed ? "The last token has no next one whose loss could change. Pick another." : "Nothing was taken away from this model: --removals sources does.");
  const bend = (v) => Math.sign(v) * Math.sqrt(Math.abs(v)), [low, high] = extent(points.map(({ y }) => y)), farthest = Math.max(...points.map(({ x }) => x));
  const reach = [Math.min(0, low), Math.max(0, high)], yTicks = rootTicks(reach[0], reach[1] || 1);
  const label = `${clip(model.name)}: weight against effect of ${points.length} sources`;
  const xTicks = () => rootTicks(0, farthest).map(({ value, label: text }) => ({ value: bend(value), label: text }));
  const { svg, X, Y, box } = axes(where, { height: 300, x: [0, bend(farthest) * 1.03], y: [bend(reach[0]) * 1.08 - 1e-9, bend(reach[1]) * 1.08 + 1e-9], xTitle: along().name, yTitle: "change of loss without it, nats", xTicks, yTicks: yTicks.map(({ value, label: text }) => ({ value: bend(value), label: text })), label });
  svg.append(make("line", { class: "zero", x1: box.left, x2: box.right, y1: Y(0), y2: Y(0) }));
  const spots = points.map((point) => ({ ...point, px: X(bend(point.x)), py: Y(bend(point.y)), mine: point.source === state.source && (point.read === null || point.read === state.read), near: point.read === null || point.read === state.read }));
  for (const spot of [...spots].sort((a, b) => a.near - b.near || a.mine - b.mine)) {
    const look = spot.source ? kindOf(model.kinds[spot.source - 1])[2] : "c0", kind = `mark dot ${look}${spot.near ? "" : " far"}${spot.mine ? " chosen" : ""}`;
    svg.append(spot.source && !SQUARE.has(model.kinds[spot.source - 1]) ? make("circle", { class: kind, cx: spot.px, cy: spot.py, r: spot.mine ? 6 : 4 }) : make("rect", { class: kind, x: spot.px - 3.5, y: spot.py - 3.5, width: spot.mine ? 10 : 7, height: spot.mine ? 10 : 7 }));
  }
  caption.textContent = `${points.length} ${points[0].read === null ? "sources, taken away at all reads" : "pairs of read and source; those of the chosen read are strong"}. Round: what mixes tokens; square: MLP, MoE and, grey, the embedding. Rank correlation of ${along().name} and size of the effect: ${minus(rankCorrelation(points).toFixed(2))}. Axes by square root.`;
  exploreSpots(svg, model, spots);
}
function rootTicks(low, high) {
  const most = Math.max(-low, high), power = 10 ** Math.floor(Math.log10(most || 1)), steps = [0.05, 0.2, 0.5, 1, 2, 5].map((m) => m * power);
  const fit = (sign, reach) => steps.filter((step) => step <= reach).map((step) => sign * step).slice(-3);
  return [...fit(-1, -low), 0, ...fit(1, high)].map((value) => ({ value, label: minus(String(Number(value.toPrecision(2)))) }));
}
function exploreSpots(svg, model, spots) {
  let last = null;
  const order = [...spots].sort((a, b) => a.px - b.px);
  explore(svg, {
    topic: `scatter-${model.index}`,
    locate: (px, py) => {
      const away = (spot) => Math.hypot(spot.px - px, spot.py - py), found = spots.reduce((best, spot) => (away(spot) < away(best) ? spot : best));
      return (last = away(found) < 24 ? found : null);
    },
    move: (point, dx, dy) => (last = order[clamp((point ? order.indexOf(point) : -1) + dx + dy, 0, order.length - 1)]),
    marks: ({ px, py }) => [make("circle", { class: "cursor cell", cx: px, cy: py, r: 8 })],
    show: (spot) => ({
      title: spot.read === null ? "At all reads" : readName(model, spot.read), at: [spot.px, spot.py],
      lines: [{ name: sourceName(model, spot.source), value: "" }, { name: along().name, value: short(spot.x, 3) }, { name: "loss without it", value: nats(spot.y) }],
    }),
  });
  const take = () => { if (last) pick({ source: last.source, ...(last.read === null ? {} : { read: last.read }) }); };
  svg.addEventListener("click", take);
  svg.addEventListener("keydown", (event) => { if (event.key === "Enter") take(); });
}

function drawSizes() {
  const panels = models.map((model) => make("div", { class: "panel" }, panelTitle(model), make("div", { class: "chart" })));
  host("sizes").replaceChildren(...panels);
  models.forEach((model, i) => sizes(panels[i].querySelector(".chart"), model));
}
function sizes(where, model) {
  const count = model.depth + 1, row = (values) => Array.from({ length: count }, (_, i) => pickOne(values, i, tokens.length)), reads = row(model.readSize), sources = row(model.sourceSize);
  const seen = [...reads, ...sources].filter((value) => value > 0), [low, high] = extent(seen.length ? seen : [1]), xs = [...Array(count).keys()];
  const xTicks = () => linearTicks(0, model.depth, 8).filter(({ value }) => Number.isInteger(value));
  const { svg, X, Y } = axes(where, { height: 240, x: [0, model.depth], y: [low / 1.2, high * 1.2], yLog: true, xTitle: "sublayer", yTitle: "root mean square", xTicks, label: `${clip(model.name)}: size of reads and sources by depth`, margin: 70 });
  // Names stand where the lines end, and never on each other.
  const [first, second] = [reads, sources].map((values) => Y(values.at(-1) || low)), apart = Math.max(7, Math.abs(first - second) / 2);
  const middle = clamp((first + second) / 2, 16 + apart, 196 - apart), side = first <= second ? -apart : apart;
  for (const [values, look, name, shift] of [[reads, "c1", "reads", side], [sources, "c2", "sources", -side]]) {
    svg.append(make("path", { class: `line ${look}`, "stroke-dasharray": look === "c2" ? "6 5" : undefined, d: path(xs, values.map((value) => value || null), X, Y) }));
    svg.append(make("text", { class: `ending ${look}`, x: X(model.depth) + 6, y: middle + shift + 4 }, name));
  }
  explore(svg, {
    topic: `sizes-${model.index}`,
    locate: (px) => clamp(Math.round(((px - X(0)) / (X(model.depth) - X(0))) * model.depth), 0, model.depth),
    move: (point, dx, dy) => clamp((point ?? -1) + dx + dy, 0, model.depth),
    marks: (i) => [make("line", { class: "cursor", x1: X(i), x2: X(i), y1: 24, y2: 200 })],
    show: (i) => ({ title: readName(model, i), at: [X(i), 60], lines: [{ name: "what is read", value: short(reads[i]) }, { name: sourceName(model, i), value: short(sources[i]) }] }),
  });
}
